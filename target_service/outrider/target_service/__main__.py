"""`outrider target`: settings to a loaded model, an engine on its device thread, a gRPC server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from outrider.rpc.errors import OutriderError
from outrider.rpc.settings import parse_settings
from outrider.target_service.settings import TargetSettings

log = logging.getLogger(__name__)

DESCRIPTION = "Serve a target model: verify drafted tokens and commit what the model itself would have produced."


def main(argv: Sequence[str] | None = None, prog: str = "outrider target") -> int:
    """Runs the service until SIGTERM or SIGINT; 2 for settings or a checkpoint that cannot be served."""
    settings = parse_settings(TargetSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning OpenMP threads starve the event loop; before torch
    from outrider.engine.models.base import UnsupportedModel
    from outrider.target_service.boot import serve

    try:
        asyncio.run(serve(settings))
    except (UnsupportedModel, OutriderError, FileNotFoundError, ValueError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
