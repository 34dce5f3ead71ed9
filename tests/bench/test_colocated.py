"""Draft and target in one process, as the network bench measures them and as they are served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import hf_greedy
from support.environment import SEED, START_S
from support.models import save_tiny, tiny_hf_model, train_byte_level
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outrider.bench.network_fleet import ColocatedBackend, NetworkBatch
from outrider.bench.network_workers import colocated_handler
from outrider.cli.local_services import ServiceFailed, Services
from outrider.client import SyncClient
from outrider.proposers.draft_model import DraftModelProposer

LENGTH = 24


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A target and a draft with one tokenizer."""
    made = []
    sizes: dict[str, dict[str, Any]] = {"large": {}, "small": {"num_hidden_layers": 1}}
    for name, options in sizes.items():
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


def test_it_is_a_way_of_the_network_bench(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounds hold four passes, each stretched to its length; the draft's own are much shorter."""
    monkeypatch.setattr(DraftModelProposer, "run", DraftModelProposer.run)  # restores it
    worker: Any = SimpleNamespace(ask=colocated_handler([*map(str, folders), "1"]))
    batch = NetworkBatch.of([range(10, 40)], streams=2, temperature=1.0, max_tokens=LENGTH, k=4, seed=SEED)
    found = asyncio.run(ColocatedBackend(worker, pass_ms=5.0).run(batch))
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
