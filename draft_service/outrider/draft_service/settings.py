"""The settings of `outrider draft`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from outrider.rpc.settings import ServiceSettings


class DraftSettings(ServiceSettings):
    """What a draft service is told at start."""

    section: ClassVar[str] = "draft"

    model: Path | None = Field(
        None, description="folder of the checkpoint (Hugging Face layout, safetensors), or a hub id: ORG/NAME"
    )
    method: Literal["draft_model", "ngram"] = Field(
        "draft_model", description="how drafts are made by default; ngram needs no model"
    )
    listen: str = Field("127.0.0.1:50052", description="address to serve on: HOST:PORT, :PORT or unix:PATH")
    name: str = Field("", description="name to serve the draft under (default: the folder's name, or the method's)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute type; auto: float32 on a CPU; float16 is for GPUs"
    )
    device: str = Field("cpu", description="where the model runs")
    threads: int | None = Field(None, ge=1, le=256, description="threads of a pass (default: all cores)")
    max_model_len: int | None = Field(None, ge=2, description="longest sequence (default: the model's)")
    cache_mb: int | None = Field(
        None,
        ge=1,
        description="memory of the key-value cache, in MiB (default: 256; on a GPU what gpu-memory-utilization leaves)",
    )
    num_blocks: int | None = Field(None, ge=1, description="blocks of 16 tokens in the cache (overrides cache-mb)")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory that is in use once the cache is there, by whomever"
    )
    cuda_graphs: bool = Field(True, description="on a GPU, capture steps at start and replay them")
    max_rows: int = Field(512, ge=1, le=65536, description="rows of one step, chains and prompts together")
    max_sequences: int = Field(256, ge=1, description="sequences open at once")
    prompt_lookup_min: int | None = Field(None, ge=1, description="shortest n-gram that is looked up (default: 5)")
    prompt_lookup_max: int | None = Field(None, ge=1, description="longest n-gram that is looked up (default: 5)")
    reflection: bool = Field(False, description="serve gRPC reflection")
    grace_s: float = Field(30.0, ge=0, description="time that running streams get on SIGTERM, in seconds")
    trace_file: Path | None = Field(None, description="append OTLP JSON lines of step spans to this file")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method == "draft_model" and self.model is None:
            raise ValueError("give --model DIR, or --method ngram, which needs no model")
        return self
