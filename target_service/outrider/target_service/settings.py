"""The settings of `outrider target`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from outrider.rpc.settings import ServiceSettings
from outrider.rpc.validate import ALL_LOGPROBS, MAX_LOGPROBS


class TargetSettings(ServiceSettings):
    """What a target service is told at start."""

    section: ClassVar[str] = "target"

    model: Path = Field(
        description="folder of the checkpoint (Hugging Face layout, safetensors), or a hub id: ORG/NAME"
    )
    listen: str = Field("127.0.0.1:50051", description="address to serve on: HOST:PORT, :PORT or unix:PATH")
    name: str = Field("", description="name to serve the model under (default: the folder's name)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute type; auto: float32 on a CPU; float16 is for GPUs"
    )
    device: str = Field("cpu", description="where the model runs")
    threads: int | None = Field(None, ge=1, le=256, description="threads of a pass (default: all cores)")
    max_model_len: int | None = Field(None, ge=2, description="longest sequence (default: the model's)")
    cache_mb: int | None = Field(
        None,
        ge=1,
        description="memory of the key-value cache, in MiB (default: 512; on a GPU what gpu-memory-utilization leaves)",
    )
    num_blocks: int | None = Field(None, ge=1, description="blocks of 16 tokens in the cache (overrides cache-mb)")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory that is in use once the cache is there, by whomever"
    )
    cuda_graphs: bool = Field(True, description="on a GPU, capture steps at start and replay them")
    prefix_cache: bool = Field(True, description="reuse the blocks of known prompts")
    batch_invariant: bool = Field(False, description="one reduction order for any number of rows: bit-identical rows")
    max_rows: int = Field(512, ge=1, le=65536, description="rows of one step, prompts and windows together")
    max_window: int = Field(32, ge=0, le=128, description="most drafted tokens of one verification")
    cut_windows: bool = Field(True, description="verify fewer drafted tokens where sequences share a step and it pays")
    max_sequences: int = Field(256, ge=1, description="sequences open at once")
    max_logprobs: int = Field(
        MAX_LOGPROBS,
        ge=ALL_LOGPROBS,
        description="most log probabilities of a position that a request may ask for; -1: the whole vocabulary's",
    )
    untrusted_draft: bool = Field(False, description="ignore the draft's weights: every drafted token is one-hot")
    trust_remote_code: bool = Field(False, description="run code that comes with the checkpoint")
    expand: bool = Field(
        False, description="compute the same function by a network of about 300M parameters (Llama; for demonstrations)"
    )
    reflection: bool = Field(False, description="serve gRPC reflection")
    grace_s: float = Field(30.0, ge=0, description="time that running streams get on SIGTERM, in seconds")
    trace_file: Path | None = Field(None, description="append OTLP JSON lines of step spans to this file")
