"""The settings of `outrider serve`, and the command lines of the three services that follow from them. What is left
open is left to the services, and so to their own variables: OUTRIDER_TARGET__MAX_ROWS works here, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from outrider.commands.fleet import GRACE_S, LOOPBACK
from outrider.pairs import pair_path
from outrider.wire.config import ServiceSettings
from outrider.wire.hub import locate

NGRAM = "ngram"
CACHE_BESIDE_TARGET = 256  # MiB of a draft on the target's GPU


class ServeSettings(ServiceSettings):
    """Which models, where they run, and where clients come in."""

    section: ClassVar[str] = "serve"

    target: Path | None = Field(
        None, description="folder or hub id of the target's checkpoint; also the bare argument (the embedded pair's)"
    )
    draft: str = Field(
        "", description=f"folder or hub id of the draft's checkpoint, or {NGRAM}, short for --method {NGRAM}"
    )
    method: Literal["draft_model", "ngram"] = Field(
        "draft_model", description="how drafts are made by default; ngram looks up the text so far and needs no model"
    )
    pair: str = Field("python", description="the embedded pair, where no target is given")
    listen: str = Field("127.0.0.1:50050", description="address of the gateway, for gRPC clients")
    http: str = Field("", description="address of the HTTP interface and the live page, as 127.0.0.1:8000 (none)")
    model_name: str = Field("", description="name to serve the model under (default: the folder's)")
    num_draft_tokens: int | None = Field(None, ge=1, le=128, description="tokens drafted a round (the gateway's: 4)")
    mode: Literal["auto", "sequential", "chains", "branches"] | None = Field(
        None, description="how far the draft runs ahead (the gateway's: auto)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        None, description="compute type of both models (auto: float32 on a CPU; float16 is for GPUs)"
    )
    device: str | None = Field(None, description="where both models run, as cpu or cuda (the services': cpu)")
    draft_device: str | None = Field(None, description="where the draft runs, if elsewhere")
    threads: int | None = Field(None, ge=1, le=256, description="threads of the target (default: all cores)")
    draft_threads: int | None = Field(None, ge=1, le=256, description="threads of the draft (default: all cores)")
    max_model_len: int | None = Field(None, ge=2, description="longest sequence (default: the models')")
    cache_mb: int | None = Field(None, ge=1, description="memory of the target's cache, in MiB (its own choice)")
    draft_cache_mb: int | None = Field(None, ge=1, description="memory of the draft's cache, in MiB (its own choice)")
    max_logprobs: int | None = Field(
        None, ge=-1, description="most log probabilities of a position that a request may ask for (20; -1: all)"
    )
    batch_invariant: bool = Field(False, description="one reduction order for any number of rows: bit-identical rows")
    trust_remote_code: bool = Field(False, description="run code that comes with the target's checkpoint")
    trace_file: Path | None = Field(None, description="file to append traces to, for outrider trace")
    start_timeout: float = Field(600.0, gt=0, description="seconds that a service may take to start")
    plain: bool = Field(False, description="no colours, and no progress bars")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target is None and self.draft not in ("", NGRAM):
            raise ValueError("give a target with this draft, as in `outrider serve TARGET --draft DRAFT`")
        if self.target is not None and not self.draft and self.method != NGRAM:
            raise ValueError(f"give --draft DIR, or --draft {NGRAM}, which needs no model")
        return self

    @property
    def uses_ngram(self) -> bool:
        """Whether drafts are looked up."""
        return NGRAM in (self.draft, self.method)

    @property
    def target_folder(self) -> Path:
        """The target's checkpoint."""
        return pair_path(self.pair).target if self.target is None else self.target

    @property
    def draft_folder(self) -> Path | None:
        """The draft's checkpoint, if there is one."""
        if self.draft == NGRAM or (self.target is None and self.uses_ngram):
            return None
        if self.target is None:
            return pair_path(self.pair).draft
        return Path(self.draft) if self.draft else None

    def located(self) -> Self:
        """With folders in place of hub ids: what is downloaded shows its progress here. Refuses what no service could
        load, before any is started."""
        found: dict[str, object] = {}
        if self.target is not None:
            found["target"] = locate(self.target, trust_remote_code=self.trust_remote_code)
        if self.draft:
            found["draft"] = str(locate(self.draft))
        settings = self.model_copy(update=found)
        settings._check_folders()
        return settings

    def _check_folders(self) -> None:
        for folder in (self.target_folder, self.draft_folder):
            if folder is not None and not (folder / "config.json").is_file():
                raise ValueError(f"{folder} is no folder of a checkpoint: it has no config.json")

    def target_arguments(self) -> list[str]:
        """`outrider target ...`"""
        flags = {
            "model": self.target_folder,
            "name": self.model_name or None,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "max-model-len": self.max_model_len,
            "cache-mb": self.cache_mb,
            "max-logprobs": self.max_logprobs,
            "batch-invariant": self.batch_invariant,
            "trust-remote-code": self.trust_remote_code,
        }
        return ["target", *self._common(LOOPBACK), *_flags(flags)]

    def draft_arguments(self) -> list[str]:
        """`outrider draft ...`"""
        flags = {
            "method": NGRAM if self.uses_ngram else None,
            "model": self.draft_folder,
            "dtype": self.dtype,
            "device": self.draft_device or self.device,
            "threads": self.draft_threads,
            "max-model-len": self.max_model_len,
            "cache-mb": self.draft_cache_mb or self._cache_beside_target,
        }
        return ["draft", *self._common(LOOPBACK), *_flags(flags)]

    def gateway_arguments(self, target: str, draft: str) -> list[str]:
        """`outrider gateway ...`, in front of the two."""
        flags = {
            "target": target,
            "draft": draft,
            "tokenizer": self.target_folder,
            "draft-tokenizer": self._draft_tokenizer,
            "http": self.http or None,
            "num-draft-tokens": self.num_draft_tokens,
            "mode": self.mode,
            "max-logprobs": self.max_logprobs,
            "model-name": self.model_name or None,
        }
        return ["gateway", *self._common(self.listen), *_flags(flags)]

    @property
    def _cache_beside_target(self) -> int | None:
        """On a GPU with the target the draft takes little: what the device has left is the target's."""
        on_cpu = (self.device or "cpu") == "cpu"
        return None if on_cpu or (self.draft_device or self.device) != self.device else CACHE_BESIDE_TARGET

    @property
    def _draft_tokenizer(self) -> Path | None:
        """For models whose tokenizers differ a little; a draft's folder may have none."""
        folder = self.draft_folder
        return folder if folder is not None and (folder / "tokenizer.json").is_file() else None

    def _common(self, listen: str) -> list[str]:
        return list(_flags({"listen": listen, "grace-s": GRACE_S, "trace-file": self.trace_file}))


def _flags(values: Mapping[str, object]) -> Iterator[str]:
    """Flags with their values; what is None or off is left to the service."""
    for name, value in values.items():
        if value is True:
            yield f"--{name}"
        elif value is not None and value is not False:
            yield f"--{name}={value}"
