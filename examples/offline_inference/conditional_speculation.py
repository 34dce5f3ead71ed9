"""No drafts while more than eight requests run; they come back when fewer do."""

from outrider.llm import LLM, SamplingParams

llm = LLM(
    model="python",
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "disable_by_batch_size": 8,  # no drafts above 8 running requests
    },
)


def num_drafts() -> int:
    """Verifications with a draft so far."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts")


large_batch = [f"def test_{i}():\n    for x in range(" for i in range(10)]
outputs = llm.generate(large_batch, SamplingParams(temperature=0.0, max_tokens=50))
print(f"Drafts in a batch of {len(outputs)}: {num_drafts()}")

before = num_drafts()
outputs = llm.generate(large_batch[:4], SamplingParams(temperature=0.0, max_tokens=50))
print(f"Drafts in a batch of {len(outputs)}: {num_drafts() - before}")
