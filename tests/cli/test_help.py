"""The help of the commands with many flags: ten first, all by subject, and every text can be read alone."""

from __future__ import annotations

import re

import pytest

from outrider.cli.colocated import ColocatedSettings
from outrider.cli.demo import DemoSettings
from outrider.cli.serve import ServeSettings
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.settings import GatewaySettings
from outrider.rpc.settings import ServiceSettings, options
from outrider.target_service.settings import TargetSettings

MODELS: list[type[ServiceSettings]] = [
    TargetSettings, DraftSettings, GatewaySettings, ServeSettings, DemoSettings, ColocatedSettings,
]  # fmt: skip
LEANS = re.compile(
    r"\b(the same (?:of|as|again)|before that|after that|this one|ditto|see above|see below)\b|^of ", re.IGNORECASE
)


@pytest.mark.parametrize("model", MODELS)
def test_ten_flags_are_needed_first(model: type[ServiceSettings]) -> None:
    known = {option.name for option in options(model)}
    assert len(model.first) == len({*model.first} & known) == 10


@pytest.mark.parametrize("model", MODELS)
def test_every_flag_has_a_subject_and_a_text_of_its_own(model: type[ServiceSettings]) -> None:
    for option in options(model):
        text = option.field.description or ""
        assert option.subject, option.name
        assert text and not LEANS.search(text), option.name
        assert text[0].islower() or re.match(r"[A-Z]{3}|[A-Z]+=|GPU", text), f"{option.name}: {text}"
