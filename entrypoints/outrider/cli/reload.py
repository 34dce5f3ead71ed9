"""`outrider admin reload`: has a running draft put other weights in its model's place, and says what they are worth; or
a running target."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from outrider.cli.access import GATEWAY
from outrider.cli.arguments import fail, parse
from outrider.cli.probes import Given, ProbeSettings, probe_gateway, probe_pair
from outrider.gateway.peers.remote import reload_model, reload_weights
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import ModelInfo
from outrider.rpc.security import open_channel

MOST_S = 86_400
DESCRIPTION = (
    "Put other weights in a draft's place while it serves. The draft is one that was started with --allow-reload; it "
    "loads them beside its own, streams go on with them, and what cannot be used changes nothing. How much of a known "
    "prompt's drafts is accepted is measured before and after: at a target, or through a gateway. Without --draft the "
    "weights are put in the place of those of --target, which was started with --allow-reload, too: what is open there "
    "ends with the weights of before, and what comes is of the new ones."
)


class ReloadSettings(ProbeSettings):
    """What is put where, and what is asked before and after."""

    section: ClassVar[str] = "reload"

    draft: str = Field("", description="address of the draft service: HOST:PORT or unix:PATH")
    model: str = Field(
        "",
        description="folder of a checkpoint on the draft's machine, or a hub id where the draft was started with "
        "--allow-hub-reload; its tokenizer is that of the present model (default: the present model's folder, read "
        "again)",
    )
    target: str = Field(
        "",
        description="address of a target, at which the draft alone is tried; without --draft it gets the weights",
    )
    drain_s: int = Field(
        600,
        ge=0,
        le=MOST_S,
        description="of a target: seconds that open sequences may go on, then they fail; 0: at once",
    )
    restart: bool = Field(
        False,
        description="of a target: what is still open then begins anew with the new weights where nobody has seen "
        "anything of its answer, and fails where somebody has",
    )
    gateway: str = Field(
        GATEWAY,
        description="address of a gateway before the draft, where no target is given; of several drafts it asks one",
    )
    probe_timeout: float = Field(30.0, gt=0, description="seconds until the known prompt is given up")
    timeout: float = Field(
        1800.0, gt=0, description="seconds until the reload is given up; the draft may go on with it"
    )


def main(argv: Sequence[str] | None = None, prog: str = "outrider admin reload") -> int:
    """Prints both models and their acceptance; 1 where the draft kept its model."""
    settings = parse(ReloadSettings, argv, prog, DESCRIPTION)
    if not (settings.draft or settings.target):
        return fail(prog, ValueError("draft: is not given; allowed: --draft ADDRESS, or --target ADDRESS alone"))
    try:
        asyncio.run(_reload(settings) if settings.draft else _reload_target(settings))
    except (OutriderError, OSError, ValueError) as error:
        return fail(prog, error)
    return 0


async def _reload(settings: ReloadSettings) -> None:
    given = settings.given(settings.probe_timeout)
    before = await _acceptance(settings, given)
    async with open_channel(settings.draft, given.access.draft) as channel:
        done = await reload_model(channel, settings.model, settings.timeout)
    print(f"before  {_model(done.before)}: {before}", flush=True)
    went_on = f"{done.num_sequences} open sequence{'' if done.num_sequences == 1 else 's'} went on"
    print(f"loaded in {done.load_ms / 1000:.1f} s; {went_on} after {done.pause_ms} ms", flush=True)
    print(f"after   {_model(done.after)}: {await _acceptance(settings, given)}")


async def _reload_target(settings: ReloadSettings) -> None:
    access = settings.given(settings.probe_timeout).access
    async with open_channel(settings.target, access.target) as channel:
        done = await reload_weights(channel, settings.model, settings.drain_s, settings.timeout, settings.restart)
    print(f"before  {_model(done.before)}")
    ended = f"{done.num_sequences} open sequence{'' if done.num_sequences == 1 else 's'} ended before their end"
    print(f"loaded in {done.load_ms / 1000:.1f} s; new requests waited for {done.pause_ms} ms; {ended}")
    print(f"after   {_model(done.after)}")


async def _acceptance(settings: ReloadSettings, given: Given) -> str:
    """How much of the known prompt's drafts is accepted, greedily; or why that is not known."""
    if settings.target:
        pair = await probe_pair(settings.target, settings.draft, given)
        return _share(pair.num_accepted_tokens, pair.num_draft_tokens, pair.problem or pair.lost_draft)
    asked = await probe_gateway(settings.gateway, given)
    stats = None if asked.drafted is None else asked.drafted.stats
    if stats is None:
        return _share(0, 0, asked.problem)
    return _share(stats.num_accepted_tokens, stats.num_draft_tokens)


def _share(accepted: int, drafted: int, problem: str = "") -> str:
    if drafted:
        return f"accepted {accepted / drafted:.0%} ({accepted}/{drafted}) of the known prompt's drafts"
    return f"acceptance is not known: {problem or 'nothing was drafted'}"


def _model(model: ModelInfo) -> str:
    return f"{model.name} {model.digest[:12]}"
