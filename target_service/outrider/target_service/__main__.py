"""`outrider target`: settings to a loaded model, an engine on its device thread, a gRPC server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.rpc import engine_service
from outrider.target_service.settings import TargetSettings

DESCRIPTION = "Serve a target model: verify drafted tokens and commit what the model itself would have produced."


def main(argv: Sequence[str] | None = None, prog: str = "outrider target") -> int:
    """Runs the service until SIGTERM or SIGINT; 2 for settings or a checkpoint that cannot be served."""
    return engine_service.main(TargetSettings, argv, prog, DESCRIPTION, serve)


async def serve(settings: TargetSettings) -> None:
    """Loads, serves, drains."""
    from outrider.target_service import boot  # torch, once the environment is set

    if settings.node_rank:
        return await boot.join(settings)
    await engine_service.serve_engine("target", settings, lambda: boot.start(settings))


if __name__ == "__main__":
    sys.exit(main())
