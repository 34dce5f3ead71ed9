"""`outrider draft`: settings to a loaded model, an engine on its device thread, a gRPC server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from outrider.draft_service.settings import DraftSettings
from outrider.rpc.errors import OutriderError
from outrider.rpc.settings import parse_settings

DESCRIPTION = "Serve a draft: run ahead of a target and propose tokens."


def main(argv: Sequence[str] | None = None, prog: str = "outrider draft") -> int:
    """Runs the service until SIGTERM or SIGINT; 2 for settings or a checkpoint that cannot be served."""
    settings = parse_settings(DraftSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning OpenMP threads starve the event loop; before torch
    from outrider.draft_service.boot import serve
    from outrider.engine.models.base import UnsupportedModel

    try:
        asyncio.run(serve(settings))
    except (UnsupportedModel, OutriderError, FileNotFoundError, ValueError) as error:
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
