"""Reinforcement in small: ten updates of a target's weights with rollouts between. The embedded pair's target learns to
write short lines (REINFORCE with a baseline); its draft stays as it is, and every token is the present policy's.

    python examples/rollouts.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from outrider.llm import LLM, RequestOutput, SamplingParams
from outrider.pairs import pair_path

STEPS, SAMPLES, LENGTH = 10, 6, 32
PROMPTS = ["def parse(text):\n", "class Reader:\n", "import os\n", "for name in names:\n"]


def rewards(outputs: list[RequestOutput]) -> Tensor:  # [prompts, samples]
    """How many lines were begun."""
    return torch.tensor([[float(one.text.count("\n")) for one in output.outputs] for output in outputs])


def log_probabilities(policy: torch.nn.Module, prompt: list[int], tokens: list[int]) -> Tensor:  # [tokens]
    """Of the tokens of a rollout, by the weights that are trained."""
    logits = policy(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def main() -> None:
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(pair_path().target, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, weight_decay=0.0)
    with LLM("python", seed=0, speculative_config={"model": "python", "num_speculative_tokens": 4}) as llm:
        for step in range(STEPS):
            sampling = SamplingParams(n=SAMPLES, max_tokens=LENGTH, ignore_eos=True, logprobs=0, seed=step)
            outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
            reward = rewards(outputs)
            advantages = reward - reward.mean(dim=1, keepdim=True)
            loss, furthest = torch.zeros(()), 0.0
            for output, of_prompt in zip(outputs, advantages, strict=True):
                for rollout, advantage in zip(output.outputs, of_prompt, strict=True):
                    tokens = list(rollout.token_ids)
                    found = log_probabilities(policy, list(output.prompt_token_ids), tokens)
                    places = zip(rollout.logprobs, tokens, strict=True)
                    told = torch.tensor([place[token].logprob for place, token in places])
                    furthest = max(furthest, float((found.detach() - told).abs().max()))
                    loss = loss - advantage * found.mean() / (len(PROMPTS) * SAMPLES)
            counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
            drafted, accepted = (counts[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
            print(
                f"update {step}: {reward.mean():.2f} lines, log probabilities differ by {furthest:.4f}, "
                f"{accepted / max(drafted, 1):.0%} of drafted tokens accepted so far"
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            llm.update_weights({"update_info": {"tensors": dict(policy.named_parameters())}})


if __name__ == "__main__":
    main()
