"""What a target says of its checkpoint when it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models import save_tiny

from outrider.target_service.boot import load
from outrider.target_service.settings import TargetSettings


def test_it_warns_once_of_what_a_generation_config_asks_for_in_vain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path)
    settings = TargetSettings.model_validate({"model": folder})
    load(settings)
    assert not caplog.records
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [1, 2], "min_new_tokens": 3}))
    load(settings)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "suppress_tokens, min_new_tokens has no effect" in record.getMessage()
