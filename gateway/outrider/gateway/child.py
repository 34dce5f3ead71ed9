"""One of several gateway processes behind the same addresses, as their supervisor starts it: `python -m
outrider.gateway.child INDEX FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.gateway.__main__ import run
from outrider.gateway.processes import GatewayProcess
from outrider.gateway.settings import GatewaySettings


def main() -> int:
    """Serves until SIGTERM, or until the supervisor has gone."""
    index, folder = sys.argv[1:]
    process = GatewayProcess(int(index), Path(folder))
    settings = GatewaySettings.model_validate_json(process.settings.read_bytes())
    return run(settings, "outrider gateway", process)


if __name__ == "__main__":
    sys.exit(main())
