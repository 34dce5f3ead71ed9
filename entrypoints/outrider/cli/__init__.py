"""The commands that are no services: each module's `main(argv, prog)` runs one and returns its exit status."""

from __future__ import annotations
