"""The loop: draft, verify, emit, until the sequence ends. It applies the effects of the sans-I/O core as events arrive,
so a commit is on its way to the draft before the client has seen it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from outrider.gateway.backends import Drafter, Verifier
from outrider.gateway.core import SpeculationCore
from outrider.gateway.driver import SpeculationDriver
from outrider.gateway.policy import Chooser, Policy
from outrider.gateway.rounds import Round
from outrider.wire.errors import from_failure
from outrider.wire.messages import Failure, Open, PromptLogprobs

log = logging.getLogger(__name__)


def warn_of_draft(reason: str) -> None:
    """Says that a sequence lost its draft."""
    log.warning("decoding goes on without a draft: %s", reason)


async def speculate(
    drafter: Drafter | None,
    verifier: Verifier,
    request: Open,
    policy: Policy,
    *,
    examines_text: bool = False,
    fork_of: SpeculationDriver | None = None,
    driver_out: list[SpeculationDriver] | None = None,
    on_draft_stop: Callable[[str], None] = warn_of_draft,
    chooser: Chooser | None = None,
) -> AsyncGenerator[Round | PromptLogprobs, None]:
    """Yields rounds (and the prompt's log probabilities, if asked for) until the target ends the sequence or the caller
    stops. A round counts as read when the next one is asked for. Raises OutriderError when no target can go on."""
    core = SpeculationCore(request, policy, examines_text, chooser)
    driver = SpeculationDriver(drafter, verifier, core, asyncio.get_running_loop(), fork_of, on_draft_stop)
    if driver_out is not None:
        driver_out.append(driver)
    try:
        driver.start()
        while True:
            item = await driver.items.get()
            if isinstance(item, Failure):
                raise from_failure(item)
            yield item
            if isinstance(item, Round):
                if item.commit.finish_reason is not None:
                    return
                driver.read(item.commit.position + len(item.commit.ids))
    finally:
        driver.close()
