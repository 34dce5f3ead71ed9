"""What every test process runs under: few threads, no network, and a seed that a failure shows. tests/conftest.py
imports it first."""

from __future__ import annotations

import os

# Before anything imports torch, transformers or tokenizers; children of the tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
for variable in [name for name in os.environ if name.startswith(("OUTRIDER_", "OTEL_"))]:
    if not variable.startswith("OUTRIDER_CI_"):  # how strict this run is
        del os.environ[variable]  # what the caller's shell sets is no part of a test

os.environ["OUTRIDER_GATEWAY__DRAFT_TRIAL"] = "off"  # drafts of random weights are to draft; its own tests try them

SEED = int(os.environ.get("TEST_SEED", "0"))
START_S = 300.0  # until a service listens, where others keep the processor busy
