"""Settings of the commands that start the services of this machine: each service's own under its name, as
`--target.threads`, and what holds for all of them. What is left open follows from the rest (the embedded pair, and
whether a draft or a head drafts), or is left to the service, and so to its own variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from outrider.cli.arguments import load_tokenizer
from outrider.cli.local_services import GRACE_S, LOOPBACK
from outrider.draft_service.settings import DraftSettings
from outrider.engine.token_tree import TokenTree
from outrider.gateway.auth import Tokens
from outrider.gateway.settings import GatewaySettings
from outrider.pairs import name_of, pair_path
from outrider.proposers.registry import HEADS, METHODS, TOKEN_METHODS, MethodSettings, method_of
from outrider.rpc.hub import embedded, locate, own_draft
from outrider.rpc.security import ServerTls
from outrider.rpc.settings import Device, Dtype, ServiceSettings, flags_of
from outrider.rpc.vocabulary import has_tokenizer
from outrider.rpc.words.request import split_methods
from outrider.target_service.settings import EngineSettings, TargetSettings

MTP = "mtp"  # a head whose layers may be in the target's own checkpoint
DRAFT_MODEL = "draft_model"
NOT_YET = "127.0.0.1:50051"  # a target's address until it listens
CACHE_BESIDE_TARGET = 256  # MiB of a draft on the target's GPU
FOR_ALL = ("device", "dtype", "trace_file", "log_format")  # settings of a service that are given once for all
OF_GATEWAY = ("trace_file", "log_format")  # those of these that it has
NO_DRAFT = "give --draft.model DIR, or --draft.method ngram, which needs no model, or --target.head DIR"
METHOD_NAMES = ("allow_code", *(name for name in MethodSettings.model_fields if name != "allow_code"))


class LocalSettings(ServiceSettings):
    """What a command is told that starts a draft (or a head), a target and a gateway on this machine."""

    subjects: ClassVar[Mapping[str, str]] = {"pair": "all services"}
    decided: ClassVar[frozenset[str]] = frozenset({"gateway.target", "gateway.draft", "gateway.tokenizer"})
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "method": ("draft.method",),
        "head": ("target.head",),
        "threads": ("target.threads",),
        "num_draft_tokens": ("gateway.num_draft_tokens",),
        **{name: (f"target.{name}",) for name in EngineSettings.model_fields},
    }
    gateway_listen: ClassVar[str] = ""  # where the gateway is unless it is told; empty: its own default

    pair: str = Field("python", description="the embedded pair, where no target is given")
    plain: bool = Field(False, description="no colours, and no progress bars")
    start_timeout: float = Field(600.0, gt=0, description="seconds that a service may take to start")
    device: Device | None = Field(None, description="where both models run, as cpu or cuda (the services' own: cpu)")
    dtype: Dtype | None = Field(None, description="compute type of both models (the services' own: auto)")
    speculative_token_tree: Annotated[str, AfterValidator(TokenTree.checked)] | None = Field(
        None,
        description="what the head, or else the draft's model, drafts for greedy and coupled requests in place of "
        'chains: paths as "[(0,), (1,), (0, 0)]", whose numbers are ranks among the likeliest tokens',
    )
    trace_file: Path | None = Field(None, description="file to append traces to, for outrider trace")
    log_format: Literal["text", "json"] | None = Field(
        None, description="show the services' logs on standard error, for people or as JSON (default: not at all)"
    )
    metrics: str = Field(
        "", description="address of the gateway's /metrics; the target's and the draft's have the next two ports (none)"
    )
    target: TargetSettings
    draft: DraftSettings | None = None  # None: a head drafts alone
    gateway: GatewaySettings

    @classmethod
    def renamed(cls, name: str, value: Any) -> tuple[str, ...]:
        """A draft was the folder of its model, or a method without a model."""
        if name == "draft" and set(split_methods(str(value))) <= set(TOKEN_METHODS):
            return ("draft.method",)
        return super().renamed(name, value)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fills in what follows from the rest. Raises ValueError for what cannot be served together."""
        target, draft, gateway = (dict(given.get(name) or {}) for name in ("target", "draft", "gateway"))
        pair = given.get("pair") or cls.model_fields["pair"].default
        named = embedded(target["model"]) if target.get("model") else None
        if named is not None and named.name == "target" and not draft.get("model") and not target.get("head"):
            pair = name_of(named).partition("/")[0]  # the pair's name brings what drafts for its target, too
            del target["model"]
        is_pair = not target.get("model")
        if is_pair and not draft.get("model"):  # what comes with its target needs no trial
            gateway.setdefault("draft_trial", "off")
        if draft.get("method") in HEADS:
            if is_pair and not target.get("head"):
                target.setdefault("head_trial", "off")
            target["head"] = target.get("head") or _head_by(draft["method"], target.get("model"), pair)
            del draft["method"]
        has_draft = _complete_draft(draft, is_pair, pair, has_head=target.get("head") is not None)
        if is_pair:
            target["model"] = pair_path(pair).target
        if (own := own_draft(draft.get("model"))) is not None:
            draft |= {"model": embedded(target["model"]) or target["model"], "quantization": own}
        if (tree := given.get("speculative_token_tree")) is not None:
            if target.get("head") is None and draft.get("method", DRAFT_MODEL) != DRAFT_MODEL:
                raise ValueError("speculative_token_tree is drafted by a head or by draft_model alone; leave it out")
            (draft if target.get("head") is None else target).setdefault("speculative_token_tree", tree)
        if cls.gateway_listen:
            gateway.setdefault("listen", cls.gateway_listen)
        gateway |= {"tokenizer": target["model"], "target": [NOT_YET]}
        for place, service in enumerate((gateway, target, draft)):
            for name in OF_GATEWAY if service is gateway else FOR_ALL:
                if given.get(name) is not None:
                    service.setdefault(name, given[name])
            service.setdefault("grace_s", GRACE_S)
            if given.get("metrics"):
                service.setdefault("metrics", _metrics_address(given["metrics"], place))
        return {**given, "pair": pair, "target": target, "draft": draft if has_draft else None, "gateway": gateway}

    def located(self) -> Self:
        """With folders in place of hub ids: what is downloaded shows its progress here. Refuses what no service could
        load, before any is started."""
        model = locate(self.target.model, trust_remote_code=self.target.trust_remote_code)
        head = None if self.target.head is None else locate(self.target.head)
        found: dict[str, object] = {"target": self.target.model_copy(update={"model": model, "head": head})}
        folders = [model, head]
        if self.draft is not None and self.draft.model is not None:
            folders.append(locate(self.draft.model, drafts_by=self.draft.method))
            found["draft"] = self.draft.model_copy(update={"model": folders[-1]})
        for folder in folders:
            if folder is not None and not (folder / "config.json").is_file():
                raise ValueError(f"{folder} is no folder of a checkpoint: it has no config.json")
        load_tokenizer(model, "--target.model")
        return self.model_copy(update=found)

    @property
    def is_closed(self) -> bool:
        """Whether not everybody who reaches the gateway is served: then no other user reaches the other two either."""
        return self.gateway.tls_cert is not None or self.gateway.tokens is not None

    def check_access(self) -> None:
        """OutriderError for files that cannot be used."""
        ServerTls.of(self.gateway)
        if self.gateway.tokens is not None:
            Tokens(self.gateway.tokens)

    def target_arguments(self, listen: str = LOOPBACK, **changed: Any) -> list[str]:
        """The command line of the target, at an address unless its settings name one; `changed` are other settings."""
        return ["target", *flags_of(self.target, **_place(self.target, listen), **changed)]

    def draft_arguments(self, listen: str = LOOPBACK) -> list[str]:
        """The command line of the draft, at an address unless its settings name one. Raises ValueError without a
        draft."""
        if self.draft is None:
            raise ValueError("draft: a head drafts alone; allowed: settings with a draft")
        changed: dict[str, Any] = {"cache_mb": self.draft.cache_mb or self._cache_beside_target(self.draft)}
        model = self.draft.model
        if model is not None and has_tokenizer(self.target.model, model):  # the target's vocabulary may be another one
            changed["target_tokenizer"] = [*self.draft.target_tokenizer, self.target.model]
        return ["draft", *flags_of(self.draft, **_place(self.draft, listen), **changed)]

    def gateway_arguments(self, target: str, draft: str) -> list[str]:
        """The command line of the gateway, in front of the target and, if it has an address, the draft."""
        drafts = [draft] if draft else []
        return ["gateway", *flags_of(self.gateway, target=[target], draft=drafts, tokenizer=[self.target.model])]

    def _cache_beside_target(self, draft: DraftSettings) -> int | None:
        """On a GPU with the target the draft takes little: what the device has left is the target's."""
        return None if draft.device == "cpu" or draft.device != self.target.device else CACHE_BESIDE_TARGET


def _place(settings: TargetSettings | DraftSettings, listen: str) -> dict[str, str]:
    return {} if "listen" in settings.model_fields_set else {"listen": listen}


def _head_by(method: str, target: Any, pair: str) -> Any:
    """The head that a method alone means: the embedded pair's, or the target's own layers. Raises ValueError for any
    other."""
    if target is None:
        return pair_path(pair).head_by(method)
    if method == MTP:
        return target
    raise ValueError(f"give --target.head DIR, the folder of the {method} head")


def _complete_draft(draft: dict[str, Any], is_pair: bool, pair: str, *, has_head: bool) -> bool:
    """Whether a draft is served: beside a head only one that was asked for. It gets the pair's model, if it needs one.
    Raises ValueError."""
    methods = split_methods(str(draft.get("method", DRAFT_MODEL)))
    if has_head and not draft.get("model") and methods == (DRAFT_MODEL,):
        if draft.get("draft_adapter"):
            raise ValueError("draft_adapter (--draft.draft-adapter) is for a draft with a model; leave it out")
        return False
    by_model = [name for name in methods if name in METHODS and method_of(name).needs_model]
    if is_pair and draft.get("model"):
        raise ValueError("give a target with this draft, as in `outrider serve TARGET --draft.model DRAFT`")
    if is_pair and by_model:
        draft["model"] = pair_path(pair).draft_by(by_model[0])
    elif by_model and not draft.get("model"):
        raise ValueError(NO_DRAFT)
    return True


def _metrics_address(metrics: str, place: int) -> str:
    """The address of the gateway's metrics (0), the target's (1) or the draft's (2); port 0 leaves all three to the
    system."""
    host, colon, port = metrics.rpartition(":")
    return f"{host}:{int(port) + place if int(port) else 0}" if colon and port.isdecimal() else metrics
