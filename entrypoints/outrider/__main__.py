"""`python -m outrider`: the command line, also where no script of it is on the path."""

from __future__ import annotations

import sys

from outrider.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
