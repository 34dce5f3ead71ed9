"""The engine vLLM, as the target finds it among `outrider.engines`."""

from outrider.vllm.target.assembly import SPECULATIVE, adapter_changes_of, start, start_engine
from outrider.vllm.target.node import serve as join

__all__ = ["SPECULATIVE", "adapter_changes_of", "join", "start", "start_engine"]
