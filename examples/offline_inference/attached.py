"""The same API over services that run elsewhere: python attached.py HOST:PORT, the address of a gateway."""

import sys

from outrider.llm import LLM, SamplingParams

llm = LLM(gateway=sys.argv[1], speculative_config={"num_speculative_tokens": 4})

outputs = llm.generate(["def main(argv):"], SamplingParams(temperature=0.0, max_tokens=60))
print(outputs[0].outputs[0].text)
for metric in llm.get_metrics():
    if "spec_decode" in metric.name:
        print(f"{metric.name}: {metric.value}")
