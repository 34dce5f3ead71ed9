"""Which tokenizer is the target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models import train_byte_fallback, train_byte_level

from outrider.gateway.peers.handshake import check_tokenizer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import ModelInfo


def model(name: str, vocab_size: int, num_tokens: int = 0, fingerprint: str = "") -> ModelInfo:
    return ModelInfo(name, "d", vocab_size, 4096, num_tokens=num_tokens, tokenizer_fingerprint=fingerprint)


def saved(folder: Path, *, fallback: bool = False, **config: str) -> Tokenizer:
    folder.mkdir()
    backend = train_byte_fallback() if fallback else train_byte_level()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def served(tokenizer: Tokenizer, name: str) -> ModelInfo:
    return model(name, tokenizer.num_tokens + 8, tokenizer.num_tokens, tokenizer.fingerprint)


def test_the_gateways_tokenizer_is_the_targets(tmp_path: Path) -> None:
    mine, other = saved(tmp_path / "a"), saved(tmp_path / "b", pad_token="<|pad|>")
    assert check_tokenizer(mine, served(mine, "t")) == ""
    assert "taken on trust" in check_tokenizer(mine, model("t", 1000))
    with pytest.raises(FailedPrecondition, match="fingerprints differ"):
        check_tokenizer(mine, served(other, "t"))
    with pytest.raises(FailedPrecondition, match="only 10"):
        check_tokenizer(mine, model("t", 10))
