"""`outrider draft`: settings to a loaded model, an engine on its device thread, a gRPC server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.draft_service.settings import DraftSettings
from outrider.rpc import engine_service

DESCRIPTION = "Serve a draft: run ahead of a target and propose tokens."


def main(argv: Sequence[str] | None = None, prog: str = "outrider draft") -> int:
    """Runs the service until SIGTERM or SIGINT; 2 for settings or a checkpoint that cannot be served."""
    return engine_service.main(DraftSettings, argv, prog, DESCRIPTION, serve)


async def serve(settings: DraftSettings) -> None:
    """Loads, serves, drains."""
    from outrider.draft_service import boot  # torch, once the environment is set

    await engine_service.serve_engine("draft", settings, lambda: boot.start(settings))


if __name__ == "__main__":
    sys.exit(main())
