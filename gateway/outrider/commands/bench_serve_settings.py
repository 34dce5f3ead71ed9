"""The settings of `outrider bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from outrider.wire.config import ServiceSettings


class BenchServeSettings(ServiceSettings):
    """Whom to load, how, with what, and what counts as good."""

    section: ClassVar[str] = "bench_serve"

    base_url: str = Field("", description="OpenAI-compatible server, as http://127.0.0.1:8000 (with or without /v1)")
    gateway: str = Field("", description="address of a gateway, over gRPC, instead")
    model: str = Field("", description="name of the model, with --base-url (default: the first that is served)")
    api_key: str = Field("", description="bearer token, with --base-url")
    rate: float | None = Field(
        None, gt=0, description="open loop: requests a second, arriving by a Poisson process whatever is under way"
    )
    concurrency: int | None = Field(
        None, ge=1, le=4096, description="closed loop: requests under way at once (4, where no rate is given)"
    )
    requests: int = Field(64, ge=1, description="requests that are measured")
    warmup: int = Field(2, ge=0, description="requests before, one after another, that are not")
    prompts: Path | None = Field(
        None, description="a JSON list of texts, JSON lines of texts or of objects with prompt, or a text a line"
    )
    chat: bool = Field(False, description="send each prompt as the message of a conversation")
    max_tokens: int = Field(64, ge=1, description="most tokens of a completion")
    ignore_eos: bool = Field(False, description="go on past the end of sequence: all completions have max-tokens")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    seed: int = Field(
        0, ge=0, lt=2**32, description="of the arrivals, of the order of the prompts, and of the sampling"
    )
    speculation: bool = Field(True, description="draft at all")
    num_draft_tokens: int | None = Field(None, ge=0, description="tokens drafted a round (default: the gateway's)")
    mode: Literal["auto", "sequential", "chains", "branches"] | None = Field(
        None, description="how far the draft runs ahead (default: the gateway's)"
    )
    acceptance: Literal["auto", "rejection", "coupled"] = Field("auto", description="how drafted tokens are accepted")
    slo_ttft_ms: float | None = Field(None, gt=0, description="a good request's first token comes within this time")
    slo_itl_ms: float | None = Field(
        None, gt=0, description="and its further ones within this time each, on the request's average"
    )
    timeout: float = Field(120.0, gt=0, description="seconds until a request counts as failed")
    json_file: Path | None = Field(None, description="also --json FILE: the result and every request, as JSON")
    plot: Path | None = Field(None, description="the distributions as a picture, an SVG file")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.base_url) == bool(self.gateway):
            raise ValueError("give one of --base-url http://HOST:PORT and --gateway HOST:PORT")
        url = urlsplit(self.base_url)
        if self.base_url and (url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError(f"--base-url must be as http://HOST:PORT, not {self.base_url!r}")
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("give --rate, for an open loop, or --concurrency, for a closed one, not both")
        if self.gateway and (self.model or self.api_key):
            raise ValueError("--model and --api-key go with --base-url")
        return self

    @property
    def num_at_once(self) -> int:
        """Requests under way at once in a closed loop."""
        return self.concurrency or 4

    @property
    def place(self) -> str:
        """The server, in words."""
        return self.base_url or f"gateway {self.gateway}"

    @property
    def loop(self) -> str:
        """How it is loaded, in words."""
        if self.rate is not None:
            return f"open loop, {self.rate:g} requests/s (Poisson)"
        return f"closed loop, {self.num_at_once} at once"

    @property
    def asks_for_speculation(self) -> bool:
        """Whether anything about speculation is other than the server's own."""
        others = self.num_draft_tokens is not None or self.mode is not None or self.acceptance != "auto"
        return others or not self.speculation
