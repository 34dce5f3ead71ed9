"""How much two models agree: both read the same tokens, and their next-token distributions are compared at every
position. Of a draft that is re-encoded there is no distribution: what it drafts is compared, here and there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_model_method
from outrider.draft_service.engine import DraftEngine
from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import LoadedModel, Quantization, load_model
from outrider.engine.model_runner import ModelRunner, RunnerOptions
from outrider.engine.models.base import UnsupportedModel
from outrider.proposers.drawing import DrawnVocabulary
from outrider.proposers.reencoding import JoinedVocabulary, Reencoding
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.messages import Commit, Credit, DraftEvent, DraftTokens, Open
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import SamplingParams

WINDOW = 512  # tokens of context; each window is read from its start
ROWS = 128  # rows of one forward pass: large vocabularies make large logits
STRIDE = 8  # tokens of the text between two places where a draft that is re-encoded is asked
AHEAD = 4  # tokens that it may draft there, so that the first one is as it would be


@dataclass(slots=True)
class Agreement:
    """A value per predicted position, the models' mean losses, and their limits."""

    target_vocab: int
    draft_vocab: int
    target_len: int
    draft_len: int
    matches: list[float] = field(default_factory=list)  # 1 where both have the same argmax, else 0
    overlaps: list[float] = field(default_factory=list)  # sum of min(target_probs, draft_probs)
    one_hots: list[float] = field(default_factory=list)  # the target's probability of the draft's argmax
    target_loss: float = 0.0
    draft_losses: list[float] = field(default_factory=list)  # of the tokens that the draft has


def compare_models(
    target: Path,
    draft: Path,
    ids: Sequence[int],
    threads: int | None = None,
    joined: JoinedVocabulary | None = None,
    quantization: Quantization | None = None,
) -> Agreement:
    """Both models on the same tokens, the target's; `joined` where the draft has others, `quantization` the draft's.
    Raises ValueError where one cannot be loaded or does not know the ids."""
    if threads is not None:
        torch.set_num_threads(threads)
    models = _load(target), _load(draft, quantization, lone_file=True)
    mapping = None if joined is None else joined.mapping
    own_ids = ids if mapping is None else mapping.spell_all(ids)
    for folder, loaded, read in zip((target, draft), models, (ids, own_ids), strict=True):
        if max(read) >= loaded.vocab_size:
            raise ValueError(f"{folder} has {loaded.vocab_size} logits, but the tokenizer gives id {max(read)}")
    result = Agreement(models[0].vocab_size, models[1].vocab_size, models[0].max_model_len, models[1].max_model_len)
    window = min(WINDOW, result.target_len, result.draft_len)
    if mapping is not None:  # at least one of the draft's tokens for each of the target's
        window = max(1, min(window, result.draft_len // max(len(mapping.spell(token_id)) for token_id in ids)))
    for start in range(0, len(ids) - 1, window):
        _read_window(result, models, ids[start : start + window + 1], mapping)
    result.target_loss /= len(result.matches)
    if joined is not None:
        _ask_reencoded(result, models, ids[:WINDOW], joined)
    return result


def _load(folder: Path, quantization: Quantization | None = None, lone_file: bool = False) -> LoadedModel:
    try:
        return load_model(folder, quantization=quantization, lone_file=lone_file)
    except UnsupportedModel as error:
        raise ValueError(str(error)) from error


def _read_window(
    result: Agreement, models: tuple[LoadedModel, LoadedModel], ids: Sequence[int], mapping: VocabularyMap | None
) -> None:
    """Adds the positions of a window: every token but the first is predicted from those before it."""
    inputs, following = ids[:-1], torch.tensor(ids[1:])
    of_target, of_draft = _probs(models[0], inputs), _probs(models[1], inputs, mapping)
    for target, draft, start in zip(of_target, of_draft, _starts(inputs), strict=True):
        shared = min(target.shape[1], draft.shape[1])  # padded vocabularies may differ
        result.matches += (target.argmax(-1) == draft.argmax(-1)).float().tolist()
        result.overlaps += torch.minimum(target[:, :shared], draft[:, :shared]).sum(-1).tolist()
        result.one_hots += target.gather(1, draft[:, :shared].argmax(-1, keepdim=True))[:, 0].tolist()
        chosen = following[start : start + len(target), None]
        result.target_loss -= float(target.gather(1, chosen).log().sum())
        likelihood = draft.gather(1, chosen)  # [rows, 1]
        result.draft_losses += (-likelihood[likelihood > 0].log()).tolist()


def _ask_reencoded(
    result: Agreement, models: tuple[LoadedModel, LoadedModel], ids: Sequence[int], joined: JoinedVocabulary
) -> None:
    """For requests that are drafted for so: whether the first token that the draft proposes is the target's, and with
    what probability the target takes it, in place of what the distributions say."""
    ways = {way for way in (joined.greedy, joined.sampled) if isinstance(way, Reencoding)}
    if not ways:
        return
    probs = torch.cat(list(_probs(models[0], ids)))  # [ids, vocab]
    drafted = _drafted(models[1], ids, joined)
    matches = [float(token == int(probs[place - 1].argmax())) for place, token in drafted.items()]
    taken = [float(probs[place - 1, token]) if token is not None else 0.0 for place, token in drafted.items()]
    if joined.greedy in ways:
        result.matches = matches
    if joined.sampled in ways:
        result.overlaps = result.one_hots = taken


def _drafted(loaded: LoadedModel, ids: Sequence[int], joined: JoinedVocabulary) -> dict[int, int | None]:
    """What the draft's engine proposes at each position, if anything, over the ids before it."""
    way = joined.greedy if isinstance(joined.greedy, Reencoding) else joined.sampled
    name = joined.mapping.target.fingerprint
    options = RunnerOptions(num_blocks=-(-loaded.max_model_len // BLOCK_SIZE))
    method = build_model_method(loaded, options, vocabularies={name: JoinedVocabulary(way, way)})
    engine = DraftEngine(make_methods([method]))
    said: list[DraftEvent] = []
    greedy = SamplingParams(temperature=0.0, max_tokens=len(ids) + AHEAD)
    messages: list[Open | Commit] = [Open(1, tuple(ids[:STRIDE]), greedy, tokenizer_fingerprint=name)]
    found: dict[int, int | None] = {}
    for place in range(STRIDE, len(ids), STRIDE):
        said.clear()
        engine.handle(Deliver(1, [*messages, Credit(1, place + AHEAD, AHEAD)], said.append))
        while engine.step(time.monotonic()) == 0.0:
            pass
        pieces = [event for event in said if isinstance(event, DraftTokens) and event.position == place]
        found[place] = next((piece.ids[0] for piece in pieces if piece.ids), None)
        messages = [Commit(1, place, tuple(ids[place : place + STRIDE]))]
    return found


def _probs(
    loaded: LoadedModel, ids: Sequence[int], mapping: VocabularyMap | None = None
) -> Iterator[Tensor]:  # each [rows, vocab] float32
    """The next-token distributions after every id of the target, and over these, a few rows at a time."""
    spelled = [(token_id,) if mapping is None else mapping.spell(token_id) for token_id in ids]
    runner = ModelRunner(loaded.model, num_blocks=-(-sum(map(len, spelled)) // BLOCK_SIZE))
    vocabulary = DrawnVocabulary.of(mapping, loaded.vocab_size, loaded.model.device)
    table, position = range(runner.cache.num_blocks), 0
    for start in _starts(ids):
        rows = spelled[start : start + ROWS]
        own_ids = [own for row in rows for own in row]
        ends = [end - 1 for end in accumulate(map(len, rows))]
        logits = runner.forward([BatchEntry(own_ids, position, table, len(own_ids))])  # [own ids, draft's vocab]
        yield vocabulary.logits(logits[ends]).softmax(-1)
        position += len(own_ids)


def _starts(ids: Sequence[int]) -> range:
    return range(0, len(ids), ROWS)


def describe(result: Agreement, num_draft_tokens: int) -> list[str]:
    """The comparison of the models, a line each."""
    greedy, sampled, one_hot = result.matches, result.overlaps, result.one_hots
    return [
        f"vocabularies  {result.target_vocab} and {result.draft_vocab} logits",
        f"context       {result.target_len} and {result.draft_len} tokens",
        f"read          {len(greedy)} positions of the text",
        f"loss          {result.target_loss:.3f} and {mean(result.draft_losses):.3f} nats a token",
        f"acceptance    {mean(greedy):.3f} greedy (same argmax), {mean(sampled):.3f} at temperature 1 (overlap)",
        f"one-hot       {mean(one_hot):.3f} at temperature 1 where the draft's likeliest token goes without weights: "
        f"these bring {mean(sampled) - mean(one_hot):+.3f}",
        f"tokens/round  {tokens_per_round(greedy, num_draft_tokens):.2f} greedy, "
        f"{tokens_per_round(sampled, num_draft_tokens):.2f} at temperature 1 "
        f"(estimates for {num_draft_tokens} drafted tokens, on this text and not on the target's own)",
    ]


def mean(values: Sequence[float]) -> float:
    """The mean of the values; not a number where there are none."""
    return sum(values) / len(values) if values else math.nan


def tokens_per_round(acceptance: Sequence[float], num_draft_tokens: int) -> float:
    """The expected tokens of a round that starts anywhere in the text: the target's own, and each drafted one if it
    and all before it are accepted."""
    width = min(num_draft_tokens, len(acceptance))
    totals = []
    for start in range(len(acceptance) - width + 1):
        survival, total = 1.0, 1.0
        for accepted in acceptance[start : start + width]:
            survival *= accepted
            total += survival
        totals.append(total)
    return mean(totals)
