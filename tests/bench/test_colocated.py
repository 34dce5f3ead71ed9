"""Draft and target alternating on one thread: the tokens are those of plain decoding, whatever the draft."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import hf_greedy
from support.environment import SEED
from support.models import save_tiny, tiny_hf_model, train_byte_level
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outrider.bench.colocated import Colocated, make_handler
from outrider.bench.network.backends import ColocatedBackend, NetworkBatch
from outrider.cli.local_services import ServiceFailed, Services
from outrider.client import SyncClient
from outrider.planner.policy import Policy, Round
from outrider.proposers.draft_model import DraftModelProposer
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import AcceptanceRule, FinishReason, SamplingParams

VOCAB = 97
LENGTH = 24
START_S = 60.0


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Colocated:
    """A target and a draft that is the target's first layer: they agree now and then."""
    target = save_tiny(tmp_path_factory.mktemp("target"), seed=1)
    draft = save_tiny(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)
    return Colocated.of(target, draft, threads=1, batch_invariant=True)


def requests(count: int, temperature: float = 0.0) -> list[Open]:
    rng = random.Random(SEED)
    sampling = SamplingParams(temperature=temperature, max_tokens=LENGTH, ignore_eos=True)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))) for _ in range(count)]
    return [Open(0, ids, sampling, acceptance=AcceptanceRule.COUPLED, seed=7 + i) for i, ids in enumerate(prompts)]


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for closed in rounds for token in closed.commit.ids]


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("streams", [1, 3])
def test_greedy_tokens_are_those_of_the_target_alone(engines: Colocated, k: int, streams: int) -> None:
    hf = tiny_hf_model("llama", 1)
    opens = requests(streams)
    decoded = engines.decode(opens, Policy(k))
    assert [tokens_of(rounds) for rounds in decoded] == [hf_greedy(hf, list(o.prompt_ids), LENGTH) for o in opens]
    assert all(rounds[-1].commit.finish_reason is FinishReason.LENGTH for rounds in decoded)
    drafted = sum(closed.commit.num_drafted for rounds in decoded for closed in rounds)
    assert (drafted > 0) == (k > 0)


def test_coupled_tokens_depend_on_no_draft(engines: Colocated) -> None:
    plain, speculated = (engines.decode(requests(2, temperature=1.0), Policy(k)) for k in (0, 4))
    assert [tokens_of(rounds) for rounds in speculated] == [tokens_of(rounds) for rounds in plain]
    assert sum(closed.commit.num_accepted for rounds in speculated for closed in rounds)


def test_every_window_is_whole_and_follows_the_one_before(engines: Colocated) -> None:
    """The draft waits for the verification, and the target for the draft: no round is plain, no draft runs ahead."""
    (request,) = requests(1)
    (rounds,) = engines.decode([request], Policy(4))
    for closed in rounds:
        left = len(request.prompt_ids) + LENGTH - closed.commit.position
        assert closed.commit.num_drafted == min(4, left) and closed.draft_us > 0
    assert all(later.started == earlier.ended for earlier, later in pairwise(rounds))


def test_nothing_stays_open_after_a_refusal(engines: Colocated) -> None:
    (good,) = requests(1)
    bad = Open(0, (VOCAB + 5,), good.sampling)
    with pytest.raises(OutriderError):
        engines.decode([good, bad], Policy(4))
    assert not engines._draft.sequences and not engines._target.scheduler.sequences
    pool = engines._target.cache.pool
    assert pool.num_free == pool.num_blocks
    assert len(tokens_of(engines.decode([good], Policy(4))[0])) == LENGTH


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A target and a draft with one tokenizer."""
    made = []
    for name, options in (("large", {}), ("small", {"num_hidden_layers": 1})):
        made.append(save_tiny(tmp_path / name, seed=1, vocab_size=300, **options))
        train_byte_level(300).save(str(made[-1] / "tokenizer.json"))
    return made


def test_one_process_serves_what_the_services_serve(folders: list[Path]) -> None:
    prompt = list(range(10, 40))
    arguments = ["--target.model", str(folders[0]), "--draft.model", str(folders[1]), "--listen", "127.0.0.1:0"]
    arguments += ["--target.threads", "1", "--draft.threads", "1"]
    with Services() as services:
        server = services.start("colocated", ["colocated", *arguments, "--grace-s", "0"])
        services.wait(server, START_S)
        with SyncClient(server.address) as client:
            parts = list(client.generate(token_ids=prompt, temperature=0.0, max_tokens=LENGTH, ignore_eos=True))
    tokens = [token for part in parts for token in part.token_ids]
    assert tokens == hf_greedy(tiny_hf_model("llama", 1, vocab_size=300), prompt, LENGTH)
    assert parts[-1].speculation is not None and parts[-1].speculation.num_drafts >= len(parts) // 2


async def test_it_is_a_way_of_the_network_bench(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounds hold four passes, each stretched to its length; the draft's own are much shorter."""
    monkeypatch.setattr(DraftModelProposer, "run", DraftModelProposer.run)  # restores it
    worker: Any = SimpleNamespace(ask=make_handler([*map(str, folders), "1"]))
    batch = NetworkBatch.of([range(10, 40)], streams=2, temperature=1.0, max_tokens=LENGTH, k=4, seed=SEED)
    found = await ColocatedBackend(worker, pass_ms=5.0).run(batch)
    assert found.accepted <= found.tested and found.tested > 0 and found.hits is None
    assert found.ms_per_token * found.tokens_per_round > 0.9 * 4 * 5.0


def test_models_that_are_no_pair_are_refused_by_name(folders: list[Path]) -> None:
    (folders[1] / "tokenizer.json").unlink()
    Tokenizer(WordLevel({"¿": 0}, unk_token="¿")).save(str(folders[1] / "tokenizer.json"))
    with Services() as services:
        server = services.start(
            "colocated", ["colocated", "--target.model", str(folders[0]), "--draft.model", str(folders[1])]
        )
        with pytest.raises(ServiceFailed, match=r"(?s)ended with status 2.*no token in common"):
            services.wait(server, START_S)
