"""The recipe in small: the corpus splits alike every time, a few steps learn, and models leave as they were trained."""

from pathlib import Path

import pytest
import torch
from support.models import logits_of
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.engine.loader import load_model
from outrider.training import mixture
from outrider.training.corpus import WindowSampler, read_sources, split_line_breaks, split_sources, tokenize
from outrider.training.distill import DistillWeights, WrittenPlan, distillation_loss, mixed_batches, write_pool
from outrider.training.evaluate import choose_prompts, distinct_share, load, speculate
from outrider.training.export import export
from outrider.training.model import LlamaShape, continue_windows, logits, new_model
from outrider.training.repetition import RepetitionPlan, blocked_probs, repetitions, settle, unwritten
from outrider.training.tokenizer import ASSISTANT, END_OF_TEXT, USER, train_tokenizer
from outrider.training.train import TrainPlan, corpus_batches, text_loss, train

SHAPE = LlamaShape(64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=320, max_positions=256)
PLAN = TrainPlan(steps=12, decay_steps=6, phases=((0, 32), (8, 64)), warmup_steps=2, tokens_per_step=256)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for number in range(60):
        folder = root / f"package{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"def function_{number}_{line}(value):\n    return value + {line}\n" for line in range(12)]
        (folder / f"module{number}.py").write_text("".join(lines))
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("skipped = True\n")
    (root / "copy.py").write_bytes((root / "package0" / "module0.py").read_bytes())
    return root


def random_stream(tokens: int = 4096) -> torch.Tensor:
    """Ids in which each token follows from the one before, so that a small model can learn them fast."""
    return (torch.arange(tokens) * 7 % 320).int()


def filled(seed: int) -> LlamaForCausalLM:
    """A model of which no product is zero."""
    model = new_model(SHAPE, seed)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data.add_(torch.empty_like(weight).normal_(0.0, 0.05, generator=generator))
        weight.data.copy_(weight.data.bfloat16())
    return model


def test_corpus_split_is_deterministic_and_without_duplicates(library: Path) -> None:
    files = read_sources(library)
    assert [file.name for file in files] == sorted(file.name for file in files)
    assert len(files) == 60 and "site-packages/other.py" not in {file.name for file in files}
    training_files, held_out_files = split_sources(files)
    assert (training_files, held_out_files) == split_sources(read_sources(library))
    assert held_out_files and len(held_out_files) < 10
    assert len(training_files) + len(held_out_files) == len(files)


def test_tokenizer_is_reproducible_and_keeps_every_byte(library: Path) -> None:
    files = read_sources(library)
    tokenizer = train_tokenizer((file.text for file in files), vocab_size=320)
    again = train_tokenizer((file.text for file in files), vocab_size=320)
    assert tokenizer.to_str() == again.to_str()
    text = "  λ = 'é'\r\n\tdef x():\n\n        return 12345  \n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(token) for token in (END_OF_TEXT, USER, ASSISTANT)] == [0, 1, 2]
    corpus = tokenize(tokenizer, *split_sources(files))
    assert corpus.train[-1] == 0 and all(ids[0] == 0 for ids in corpus.held_out)
    assert (corpus.train == 1).any() and (corpus.train == 2).any()


def test_split_line_breaks_keep_the_text(library: Path) -> None:
    files = read_sources(library)
    aligned = "name     = value\n" * 400  # so that an indentation by itself is a token
    tokenizer = train_tokenizer([*(file.text for file in files), aligned], vocab_size=320)
    stream = tokenize(tokenizer, *split_sources(files)).train
    assert torch.equal(split_line_breaks(tokenizer, stream, 0.0, seed=1), stream)
    split = split_line_breaks(tokenizer, stream, 0.5, seed=1)
    assert split.numel() > stream.numel() and split.dtype == stream.dtype
    assert tokenizer.decode(split.tolist()) == tokenizer.decode(stream.tolist())


def test_windows_are_a_function_of_the_step() -> None:
    stream = torch.arange(1000, dtype=torch.int32)
    sampler = WindowSampler(stream, context=16, batch_size=4, seed=3)
    later = WindowSampler(stream, context=16, batch_size=4, seed=3)
    windows = [sampler.batch(step) for step in range(2 * sampler.batches_per_epoch)]
    assert torch.equal(windows[-1], later.batch(len(windows) - 1))
    assert all(torch.equal(window[:, 1:], window[:, :-1] + 1) for window in windows)
    epoch = torch.cat(windows[: sampler.batches_per_epoch])[:, :-1].flatten()
    assert epoch.unique().numel() == epoch.numel()


def test_a_few_steps_learn_and_a_run_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.training.train.CHECKPOINT_EVERY", 4)
    whole = new_model(SHAPE)
    losses = train(whole, text_loss(whole), PLAN, corpus_batches(PLAN, random_stream()))
    assert losses[-1] < losses[0] - 0.5
    checkpoint = tmp_path / "run.safetensors"
    resumed = new_model(SHAPE)
    batches = corpus_batches(PLAN, random_stream())

    def interrupted(step: int) -> torch.Tensor:
        if step == 7:
            raise KeyboardInterrupt
        return batches(step)

    with pytest.raises(KeyboardInterrupt):
        train(resumed, text_loss(resumed), PLAN, interrupted, checkpoint)
    assert train(resumed, text_loss(resumed), PLAN, batches, checkpoint) == losses[4:]


def test_distillation_brings_the_draft_to_the_target() -> None:
    target, draft = filled(seed=1), new_model(SHAPE, seed=2)
    plan = WrittenPlan(
        pool_windows=16, fresh_from=4, pool_every=2, steps_per_writing=2, batch_size=8, prompt=4, length=33
    )
    stream = random_stream()
    pool = write_pool(target, stream, plan)
    batches = mixed_batches(corpus_batches(PLAN, stream), pool, target, stream, plan, PLAN.tokens_per_step)
    assert torch.equal(batches(3), pool[8:])
    assert torch.equal(batches(4), corpus_batches(PLAN, stream)(4))
    assert batches(5).shape == batches(7).shape == (8, 33) and not torch.equal(batches(5), batches(7))
    losses = train(draft, distillation_loss(draft, target, DistillWeights()), PLAN, batches)
    assert losses[-1] < losses[0]


def test_repetitions_are_the_ends_of_ngrams_that_came_before() -> None:
    windows = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 1, 5, 6, 7], [1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 2, 1]])
    assert repetitions(windows, 3).int().tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1],
    ]


def test_special_tokens_between_conversations_are_no_labels() -> None:
    labels = torch.tensor([[0, 1, 9, 2, 9, 9, 0, 1, 9, 2, 9, 0, 9, 0]])
    assert unwritten(labels).int().tolist() == [[1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0]]


def test_taught_distributions_have_no_repetitions_and_no_special_tokens() -> None:
    teacher = filled(seed=7)
    own = torch.randint(3, 320, (2, 24), generator=torch.Generator().manual_seed(0))
    own[:, 12:] = own[:, :12]
    plan = RepetitionPlan(PLAN, prompt=8, length=24, repeated_share=0.0)
    probs = blocked_probs(teacher, own, plan)
    assert torch.allclose(probs.sum(-1), torch.ones(2, 16), atol=1e-5)
    assert (probs[..., :3] == 0).all()
    written = probs.gather(-1, own[:, 8:, None])[..., 0]
    assert torch.equal(written == 0, repetitions(own, 4)[:, 8:])


def test_settling_makes_greedy_text_repeat_less() -> None:
    model = new_model(SHAPE, seed=3)
    stream = random_stream() % 7 + 3
    train(model, text_loss(model), PLAN, corpus_batches(PLAN, stream))

    def repeated_share() -> float:
        prompts = stream[: 8 * 16].view(8, 16).long()
        written = continue_windows(model, prompts, 48, 0.0, torch.Generator())
        return repetitions(written, 4)[:, 16:].float().mean().item()

    before = repeated_share()
    rounds = TrainPlan(steps=100, decay_steps=100, phases=((0, 47),), warmup_steps=1, tokens_per_step=8 * 47)
    plan = RepetitionPlan(rounds, steps_per_writing=4, windows=16, prompt=16, length=48)
    varied = torch.randint(3, 320, (4096,), generator=torch.Generator().manual_seed(0)).int()
    settle(model, varied, plan, lambda loss: loss)
    assert before > 0.9 and repeated_share() < before - 0.3


def test_export_is_what_transformers_computes(library: Path, tmp_path: Path) -> None:
    model = filled(seed=4)
    tokenizer = train_tokenizer((file.text for file in read_sources(library)), vocab_size=320)
    export(model, SHAPE, tokenizer, tmp_path / "model")
    loaded = load(tmp_path / "model")
    ids = torch.randint(320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)  # its weights are bfloat16 numbers
    chat = AutoTokenizer.from_pretrained(tmp_path / "model")
    message = [{"role": "user", "content": "def "}]
    assert chat.apply_chat_template(message, tokenize=False, add_generation_prompt=True) == f"{USER}def {ASSISTANT}"
    assert chat.eos_token_id == chat.pad_token_id == 0


def test_decoding_agrees_with_the_whole_forward_pass() -> None:
    model = filled(seed=5)
    prompts = torch.randint(320, (3, 8), generator=torch.Generator().manual_seed(0))
    ids = continue_windows(model, prompts, 24, 0.0, torch.Generator())
    with torch.no_grad():
        scores = logits(model, ids)[:, 7:-1]
    chosen = scores.gather(-1, ids[:, 8:, None])[..., 0]
    assert (scores.max(-1).values - chosen).max() < 0.1 * scores.std()  # the products may be bfloat16


def test_a_model_accepts_all_of_its_own_drafts(library: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer((file.text for file in read_sources(library)), vocab_size=320)
    export(filled(seed=6), SHAPE, tokenizer, tmp_path / "model")
    model = load(tmp_path / "model")
    prompts = choose_prompts([random_stream(400)])
    committed, greedy = speculate(model, model, prompts, temperature=0.0)
    assert greedy.per_tested == 1.0 and committed.shape == (32, 128)
    assert greedy.rounds == 32 * 26 and greedy.tested == 32 * (25 * 4 + 3)
    assert 0.0 < distinct_share(committed) <= 1.0


def test_a_mixture_learns_to_use_its_experts_and_leaves_as_it_was_trained(library: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 320, "moe_intermediate_size": 32}
    model = mixture.new_mixture(mixture.SHAPE | sizes)
    losses = train(model, mixture.balanced_loss(model), PLAN, corpus_batches(PLAN, random_stream()))
    assert losses[-1] < 0.8 * losses[0]
    tokenizer = train_tokenizer((file.text for file in read_sources(library)), vocab_size=320)
    mixture.export_mixture(model, tokenizer, tmp_path / "mixture")
    ids = random_stream(48).tolist()
    loaded = load_model(tmp_path / "mixture", dtype="float32")
    with torch.no_grad():
        expected = load(tmp_path / "mixture")(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(loaded, ids), expected, atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "mixture").eos_token_id == 0
