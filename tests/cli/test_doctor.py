"""`outrider doctor`: toy deployments that are whole, and that are broken in every way that it knows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import chain
from typing import Any, cast

import pytest
from support.fakes import (
    DraftServicer,
    TargetServicer,
    ToyDraft,
    ToyTarget,
    arithmetic,
    draft_info,
    serving,
    target_info,
    with_adapters,
)
from support.gateways import over_grpc, toy_tokenizer
from support.services import Trio, outrider

from outrider.cli.deployment import Deployment, Peer, look
from outrider.cli.diagnosis import NOTE, PROBLEM, Finding, diagnose
from outrider.cli.doctor import report
from outrider.cli.probes import Given
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.servicer import GenerationServicer
from outrider.rpc.messages import DraftInfo, DraftMethod, DraftTrial, DraftVocabulary, Failure, TargetInfo
from outrider.rpc.words.sampling_params import BASELINE

VERSION = metadata.version("outrider")
FAR = Given(max_round_trip_ms=10_000)  # a busy machine's loopback is no finding
SAME = {"tokenizer_fingerprint": "f", "num_tokens": 400, "engine": "outrider-0.1.0", "kernels": "c-avx2-1"}


def a_target(**fields: Any) -> ToyTarget:
    info = target_info(**{**SAME, "batch_invariant": True, **fields})
    return ToyTarget(info=replace(info, capabilities=BASELINE, version=VERSION))


def a_draft(**fields: Any) -> ToyDraft:
    return ToyDraft(wrong_every=5, info=replace(draft_info(**{**SAME, **fields}), version=VERSION))


@dataclass
class Toys:
    """A deployment: gateways over the first target and draft, in this process."""

    targets: Sequence[ToyTarget] = field(default_factory=lambda: [a_target()])
    drafts: Sequence[ToyDraft] = field(default_factory=lambda: [a_draft()])
    gateway_target: ToyTarget | None = None  # of the gateway; none: the first of them
    gateway_draft: ToyDraft | None = field(default_factory=a_draft)
    num_gateways: int = 1


@asynccontextmanager
async def running(toys: Toys, **options: Any) -> AsyncIterator[Given]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        targets = [(await enter(serving(TargetServicer(toy)))).address for toy in toys.targets]
        drafts = [(await enter(serving(DraftServicer(toy)))).address for toy in toys.drafts]
        gateways = []
        for _ in range(toys.num_gateways):
            target = toys.gateway_target or toys.targets[0]
            engine = GenerationEngine(toy_tokenizer(), target, toys.gateway_draft, EngineConfig(num_draft_tokens=4))
            gateways.append(await enter(over_grpc(GenerationServicer(engine))))
        yield Given(gateways, targets, drafts, timeout_s=30.0, **options)


async def examined(toys: Toys, limits: Given = FAR, **options: Any) -> tuple[Deployment, list[Finding]]:
    async with running(toys, **options) as given:
        seen = await look(given)
    return seen, diagnose(seen, limits)


def the_one(found: list[Finding], level: str = PROBLEM) -> Finding:
    (one,) = (finding for finding in found if finding.level == level)
    return one


def shown(seen: Deployment, found: Sequence[Finding]) -> list[str]:
    return "".join(text for text, _ in report(seen, found)).splitlines()


async def test_a_sound_deployment_has_no_finding_and_sums_of_its_rounds() -> None:
    seen, found = await examined(Toys([a_target(), a_target()], [a_draft()], num_gateways=2))
    assert found == []
    lines = shown(seen, found)
    assert [line.split()[:3] for line in lines[:5]] == [
        [peer.kind, peer.address, "serving"] for peer in chain[Peer](seen.gateways, seen.targets, seen.drafts)
    ]
    assert lines[-1] == "nothing is wrong"
    assert sum(line.startswith("probe of target") for line in lines) == 2  # a target each, with the one draft
    assert sum(line.startswith("round ") and "100%" in line for line in lines) == 2
    (asked, _), (probe, _) = seen.gateway_probes, seen.pair_probes
    assert asked.drafted is not None and asked.plain is not None and len(asked.drafted.token_ids) == 32
    assert tuple(probe.token_ids) == asked.plain.token_ids  # the same prompt, by a loop of the doctor's own
    assert 0 < probe.num_accepted_tokens < probe.num_draft_tokens


async def test_who_does_not_answer() -> None:
    toys = Toys()
    async with running(toys) as given, serving(DraftServicer(a_draft())) as other:
        gone = "127.0.0.1:1"
        given = replace(given, targets=[*given.targets, gone], drafts=[*given.drafts, "dns:///no.such.invalid:1"])
        found = diagnose(await look(replace(given, gateways=[*given.gateways, other.address])), FAR)
    messages = {one.subject: one.message for one in found if one.check == "reachable"}
    assert messages[f"target {gone}"].startswith("does not answer")
    assert messages["draft dns:///no.such.invalid:1"].startswith("cannot be looked up")
    assert messages[f"gateway {other.address}"].startswith("is no gateway: it does not serve")
    assert len(found) == 3 and all(one.level == PROBLEM for one in found)


async def test_who_answers_and_does_not_serve() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(TargetServicer(a_target())))
        await server.health.drain()
        found = diagnose(await look(Given([], [server.address], [])), FAR)
    assert the_one(found).check == "health" and "NOT_SERVING" in the_one(found).message


OTHER = {"tokenizer_fingerprint": "g"}
LESS = ("sampling.min_p",)


async def test_a_draft_that_maps_the_targets_vocabulary_is_sound() -> None:
    _, found = await examined(Toys(drafts=[a_draft(**OTHER, mapped_fingerprints=("f",))]))
    assert found == []


async def test_how_a_draft_of_another_vocabulary_drafts_is_said() -> None:
    draft = a_draft(**OTHER, mapped_fingerprints=("f",))
    draft.info = replace(cast(DraftInfo, draft.info), vocabularies=(DraftVocabulary("f", 0.24, "string", "token"),))
    _, (found,) = await examined(Toys(drafts=[draft]))
    assert found.level == NOTE and "has 24.0% of the tokens of" in found.message
    assert "string-level for greedy requests, token-level for sampled ones" in found.message
    draft = a_draft(**OTHER)
    draft.info = replace(cast(DraftInfo, draft.info), max_vocabulary_bytes=1 << 26)
    _, found_there = await examined(Toys(drafts=[draft]))
    pair = [one for one in found_there if one.check == "pair"]
    assert [one.level for one in pair] == [NOTE] and "a gateway that has it brings it" in pair[0].message


def lacking(info: TargetInfo | DraftInfo) -> Any:
    return replace(info, capabilities=tuple(name for name in info.capabilities if name not in LESS))


def less_able(toy: Any) -> Any:
    toy.info = lacking(toy.info)
    return toy


def released(toy: Any, version: str) -> Any:
    toy.info = replace(toy.info, version=version)
    return toy


@pytest.mark.parametrize(
    ("toys", "check", "words"),
    [
        pytest.param(lambda: Toys(drafts=[a_draft(**OTHER)]), "pair", "not a pair: the tokenizers", id="tokenizer"),
        pytest.param(lambda: Toys([a_target(num_tokens=500)]), "vocabulary", "names 500 tokens", id="logits"),
        pytest.param(
            lambda: Toys([a_target(), a_target(digest="d9", name="new")]), "digest", "d9 at ", id="target digests"
        ),
        pytest.param(lambda: Toys(drafts=[a_draft(), a_draft(digest="d9")]), "digest", "d9 at ", id="draft digests"),
        pytest.param(lambda: Toys(gateway_target=a_target(digest="d9")), "digest", "serves toy (d9)", id="gateway's"),
        pytest.param(
            lambda: Toys(gateway_draft=a_draft(digest="d9")), "digest", "with toy-draft (d9)", id="gateway's draft"
        ),
        pytest.param(lambda: Toys([a_target(protocol_major=2)]), "version", "speaks protocol 2", id="protocol"),
        pytest.param(
            lambda: Toys(drafts=[released(a_draft(), "0.0.9")]), "version", "0.0.9 at draft ", id="releases"
        ),
        pytest.param(
            lambda: Toys([a_target(), a_target(kernels="c-sse2-1")]), "arithmetic", "c-sse2-1 at ", id="arithmetic"
        ),
        pytest.param(
            lambda: Toys([a_target(kernels="torch-2.9.0-avx2")]), "kernels", "not by the C kernels", id="fallback"
        ),
        pytest.param(
            lambda: Toys(drafts=[a_draft(engine="transformers-5.0.0", kernels="torch-2.9.0-avx2")]),
            "kernels",
            "layers of transformers-5.0.0",
            id="other layers",
        ),
        pytest.param(
            lambda: Toys(drafts=[less_able(a_draft())]), "capabilities", "without this draft", id="a draft's"
        ),
        pytest.param(
            lambda: Toys([a_target(), less_able(a_target())]), "capabilities", "refused there", id="a target's"
        ),
        pytest.param(lambda: Toys(gateway_draft=None), "draft", "decoded plainly", id="no draft at the gateway"),
        pytest.param(lambda: Toys([a_target(), ToyTarget()]), "pair", "", id="tokenizers of replicas"),
    ],
)  # fmt: skip
async def test_what_they_say_of_themselves(toys: Any, check: str, words: str) -> None:
    _, found = await examined(toys())
    hits = [one for one in found if one.check == check and one.level == PROBLEM and words in one.message]
    assert len(hits) == 1, found


def off_by_one(tokens: Sequence[int], prompt_len: int) -> int:
    return arithmetic(tokens, prompt_len) + 1


@pytest.mark.parametrize("where", ["gateway", "services"])
async def test_a_draft_of_another_target_is_seen_by_its_acceptance(where: str) -> None:
    bad = ToyDraft(rule=off_by_one, info=a_draft().info)
    toys = Toys(gateway_draft=bad) if where == "gateway" else Toys(drafts=[bad])
    _, found = await examined(toys)
    one = the_one(found)
    assert one.check == "acceptance" and one.subject.startswith("gateway" if where == "gateway" else "target")
    assert one.message.startswith("0 of ")
    _, found = await examined(toys, replace(FAR, min_acceptance=0.0))
    assert found == []


async def test_a_mute_draft_is_seen() -> None:
    mute = ToyDraft(mute=True, info=a_draft().info)
    _, found = await examined(Toys(drafts=[mute]))
    assert "no token of the known prompt was drafted" in the_one(found).message


async def test_a_draft_without_a_model_may_accept_little() -> None:
    lookup = ToyDraft(rule=off_by_one, info=a_draft(vocab_size=0, digest="").info)
    _, found = await examined(Toys(drafts=[lookup], gateway_draft=lookup))
    assert found == []


async def test_a_target_on_vllm_is_sound() -> None:
    """Its kernels are no fallback; its engine and that one's version are shown."""
    seen, found = await examined(Toys([a_target(engine="vllm-0.32.0", kernels="torch-2.13.0")]))
    assert found == []
    lines = shown(seen, found)
    assert any(line.startswith("target ") and "by vllm-0.32.0, torch-2.13.0" in line for line in lines)


async def test_a_target_that_drafts_itself_needs_no_draft() -> None:
    """Its head is judged as a draft is, alone and beside one."""
    target = a_target()
    target.info = replace(target.info, methods=(DraftMethod("eagle3", needs_features=True, can_run_ahead=False),))
    seen, found = await examined(Toys([target], [], gateway_draft=None))
    assert found == []
    lines = shown(seen, found)
    assert any("target" in line and "drafts by its eagle3" in line for line in lines)
    assert any(line.startswith("probe of target") and "by its eagle3: 32 tokens" in line for line in lines)
    _, found = await examined(Toys([target], [], gateway_draft=None), replace(FAR, min_acceptance=0.99))
    assert [one.check for one in found] == ["acceptance"] * 2
    seen, _ = await examined(Toys([target]))
    assert [(bool(probe.draft), probe.head) for probe in seen.pair_probes] == [(True, ""), (False, "eagle3")]


async def test_what_a_trial_found_is_told() -> None:
    """One that is no better than a guess is a problem, whether it drafts or not; a remark is a note."""
    useless = DraftTrial("eagle3", (0.02, 0.0), guess=0.1, num_rounds=90, refused=True)
    remarked = DraftTrial("dflash", (0.8, 0.7), guess=0.1, num_rounds=40, remark="the last token's row gives the first")

    def having(*trials: DraftTrial) -> Toys:
        target = a_target()
        target.info = replace(target.info, trials=trials)
        return Toys([target])

    _, found = await examined(having(useless))
    assert the_one(found).check == "trial" and "no better than a guess, and it is not used" in the_one(found).message
    _, found = await examined(having(replace(useless, refused=False)))
    assert "it drafts all the same" in the_one(found).message
    _, found = await examined(having(remarked))
    assert the_one(found, NOTE).message == "dflash: the last token's row gives the first"


async def test_adapters_that_are_not_everywhere_are_noted_and_two_of_a_name_are_a_problem() -> None:
    def having(**digests: str) -> ToyTarget:
        return ToyTarget(info=with_adapters(a_target().info, **digests))

    seen, found = await examined(Toys([having(sql="a1", law="b1"), having(sql="a1", law="b1")]))
    assert found == []
    lines = shown(seen, found)
    assert sum(line.startswith("target ") and line.endswith(", adapters sql, law") for line in lines) == 2
    seen, found = await examined(Toys([having(sql="a1"), having(sql="a2"), having()]))
    one, two, three = (peer.address for peer in seen.targets)
    problem, note = the_one(found), the_one(found, NOTE)
    assert problem.check == note.check == "adapters"
    assert f"'sql' is not the same everywhere: a1 at {one}; a2 at {two};" in problem.message
    assert note.message == f"'sql' is not at {three}: its requests go to the others alone"


async def test_a_target_that_refuses_is_seen_at_both_places() -> None:
    full = ToyTarget(info=a_target().info, full=Failure(0, 3, "open.seed: is 1; allowed: none"))
    async with AsyncExitStack() as stack:
        servicer = TargetServicer(full)
        servicer.refuse = full.full
        target = await stack.enter_async_context(serving(servicer))
        engine = GenerationEngine(toy_tokenizer(), full, None, EngineConfig())
        gateway = await stack.enter_async_context(over_grpc(GenerationServicer(engine)))
        found = diagnose(await look(Given([gateway], [target.address], [], timeout_s=5.0)), FAR)
    problems = [one for one in found if one.level == PROBLEM]
    assert [one.check for one in problems] == ["probe", "probe"]
    assert all("open.seed" in one.message for one in problems)
    assert {one.check for one in found if one.level == NOTE} == {"draft", "coverage"}


async def test_a_target_that_never_answers_a_prompt() -> None:
    stuck = ToyTarget(info=a_target().info, step_s=60.0)
    async with running(Toys([stuck], [], num_gateways=0)) as given:
        found = diagnose(await look(replace(given, timeout_s=3.0)), FAR)
    assert the_one(found).message == "the known prompt is not completed within 3 s"


@pytest.mark.parametrize("invariant", [True, False])
async def test_replicas_that_disagree(invariant: bool) -> None:
    """With the same weights, and, if they say so, the same bits."""
    one, other = a_target(batch_invariant=invariant), a_target(batch_invariant=invariant)
    other.rule = off_by_one
    _, found = await examined(Toys([one, other], []))
    (differs,) = (finding for finding in found if finding.check == "lossless")
    assert differs.level == (PROBLEM if invariant else NOTE) and "from token 1 on" in differs.message


@pytest.mark.parametrize("invariant", [True, False])
async def test_drafts_that_change_the_output(invariant: bool) -> None:
    """At a gateway's target: its second completion is another one."""
    target = a_target(batch_invariant=invariant)

    def rule(tokens: Sequence[int], prompt_len: int) -> int:
        return arithmetic(tokens, prompt_len) + (len(target.opens) > 1)

    target.rule = rule
    _, found = await examined(Toys(drafts=[], gateway_target=target))
    (differs,) = (finding for finding in found if finding.check == "lossless")
    assert differs.level == (PROBLEM if invariant else NOTE)
    assert "differs with drafted tokens and without, from token 1 on" in differs.message


async def test_a_round_trip_is_held_against_a_verification() -> None:
    costs = ((1, 1), (8, 2))  # microseconds: no loopback is that quick
    quick = a_target()
    quick.info = replace(quick.info, step_costs=costs)
    seen, found = await examined(Toys([quick]), Given())
    here = [one for one in found if one.check == "round trip"]
    assert len(here) == 2 and all("longer than a verification takes (0.0 ms)" in one.message for one in here)
    assert all(one.level == NOTE and "closer" not in one.message for one in here), "nothing is closer than this machine"
    away = replace(seen, targets=(replace(seen.targets[0], address="192.0.2.1:50051"),), pair_probes=())
    far, _ = (one for one in diagnose(away, Given()) if one.check == "round trip")
    assert far.level == PROBLEM and far.message.endswith("move them closer")
    _, found = await examined(Toys([quick]), FAR)
    assert found == []
    _, found = await examined(Toys(), Given())  # nothing measured, nothing to hold it against
    assert found == []


async def test_notes_are_no_problems() -> None:
    """A draft of a shorter context, and one whose tokenizer nobody knows."""
    toys = Toys(drafts=[a_draft(max_model_len=128, tokenizer_fingerprint="", num_tokens=0)])
    _, found = await examined(toys)
    assert [(one.level, one.check) for one in found] == [(NOTE, "pair"), (NOTE, "context")]


async def test_without_a_gateway_the_prompt_is_ids() -> None:
    """Arbitrary ones, whose acceptance says nothing; or those of the tokenizer given."""
    bad = ToyDraft(rule=off_by_one, info=a_draft().info)
    seen, found = await examined(Toys(drafts=[bad], num_gateways=0))
    assert not seen.is_text and [one.check for one in found] == ["coverage"]
    seen, found = await examined(Toys(drafts=[bad], num_gateways=0), prompt_ids=(7, 8, 9))
    assert seen.is_text and the_one(found).check == "acceptance"


def test_the_services_of_the_embedded_pair(trio: Trio) -> None:
    peers = ("--gateway", trio.gateway, "--target", f"ipv4:{trio.target}", "--draft", f"dns:///{trio.draft}")
    done = outrider("doctor", *peers, "--max-round-trip-ms", "10000", "--json")
    seen = json.loads(done.stdout)
    assert done.returncode == 0 and seen["ok"], seen["findings"]
    assert seen["targets"][0]["info"]["model"]["batch_invariant"] and seen["gateways"][0]["info"]["version"]
    (probe,) = seen["pair_probes"]
    assert len(probe["token_ids"]) == 32 and probe["num_accepted_tokens"] > 0
    # A commit that came in while the gateway was still at the one before ends a round that is shorter than its parts,
    # which are cut at its start: the span of a verification may be missing.
    timed = [one["verify_ms"] for one in probe["rounds"] if "verify_ms" in one]
    assert min(timed) > 0 and len(timed) > len(probe["rounds"]) / 2
    shown = outrider("doctor", *peers, "--max-round-trip-ms", "10000", "--plain")
    assert shown.returncode == 0 and shown.stdout.endswith("nothing is wrong\n")


def test_nobody_there() -> None:
    done = outrider("doctor", "--gateway", "127.0.0.1:1")
    assert done.returncode == 1 and "problem  reachable     gateway 127.0.0.1:1: does not answer" in done.stdout
    assert done.stderr == "" and "1 problem\n" in done.stdout


def test_an_address_that_is_none() -> None:
    done = outrider("doctor", "--target", "nowhere")
    assert done.returncode == 2 and "--target: is 'nowhere'; allowed: host:port" in done.stderr
