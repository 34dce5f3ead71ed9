"""Conversations: the checkpoint's chat template, or one given here, turns them into prompts."""

from outrider.llm import LLM, SamplingParams

TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"

llm = LLM(
    model="python",
    speculative_config={
        "model": "python",
        "num_speculative_tokens": 4,
    },
)

conversation = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "a function that adds two numbers"},
]
outputs = llm.chat(conversation, SamplingParams(temperature=0.0, max_tokens=40), chat_template=TEMPLATE)
print(outputs[0].prompt + outputs[0].outputs[0].text)
