"""SpeculativeConfig: how to draft, with vLLM's fields and checks; which of vLLM's methods are there, and what the
others are."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from outrider.engine.token_tree import TokenTree
from outrider.gateway.speculation.schedule import BatchSchedule
from outrider.llm.validation import (
    CONFIG,
    Fixed,
    Integer,
    Number,
    Only,
    Unsupported,
    fixed_fields,
    integer,
    is_int,
    must_be,
    one_of,
    plain_errors,
    require_fixed,
)
from outrider.proposers.registry import (
    BLOCKS,
    CHOICES,
    HEADS,
    METHODS,
    block_tokens,
    drafts_at_once,
    head_of,
    is_class,
    list_problem,
    method_of,
    needs_model,
)
from outrider.rpc.hub import embedded, is_hub_id, locate, own_draft
from outrider.rpc.messages import MAX_DRAFT_TOKENS
from outrider.rpc.words.request import DRAFT_OPTIONS, DraftOptions, Range, split_methods
from outrider.rpc.words.sampling_params import AcceptanceRule


class VllmMethod(NamedTuple):
    """A method of vLLM's that is not there yet."""

    what: str
    needs_model: bool = True


MISSING = {
    "ngram_gpu": VllmMethod("n-gram lookup on a GPU; 'ngram' proposes the same way", needs_model=False),
    "extract_hidden_states": VllmMethod("an export of hidden states, which drafts nothing", needs_model=False),
}
WORDS = {  # in the names of checkpoints, in the order in which they are looked for
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "p-eagle": "eagle3",
    "eagle-": "eagle",
    "-accelerator": "mlp_speculator",
    "dflash": "dflash",
    "dspark": "dspark",
}
CUSTOM_CLASS = "custom_class"  # `model` then names the class
MTP = "mtp"  # without `model` it is of the target's own checkpoint
KNOWN = (*METHODS, *HEADS, CUSTOM_CLASS, *MISSING)
NGRAM_NAMES = ("ngram", "[ngram]")
ROUNDED = "a draft's weights are as they are, or rounded to few bits"
NO_K = "num_speculative_tokens is needed: how many tokens to draft in a round"
INSTEAD = "allowed: " + "; ".join(f"{row.name} ({row.summary})" for row in (*METHODS.values(), *HEADS.values()))

# Fields of vLLM's that must have one of these values, and why no other.
FOLDERS = "models are folders: give the folder of that revision"
LOSSY = "lossy acceptance is not offered"
MADE_UP = "acceptance is never made up"
ONE_BACKEND = "there is one backend"
REFUSED: Fixed = {
    "draft_lm_head_quantization": ((None,), "drafts are computed in float32 or bfloat16"),
    "revision": ((None,), FOLDERS),
    "code_revision": ((None,), FOLDERS),
    "use_local_argmax_reduction": ((False,), "it is for tensor parallel drafts"),
    "synthetic_acceptance_rates": ((None,), MADE_UP),
    "synthetic_acceptance_length": ((None,), MADE_UP),
    "enable_adaptive_verification": ((False,), "it is not there yet"),
    "fly_window_size": ((None,), LOSSY),
    "fly_entropy_threshold": ((None,), LOSSY),
    "fly_entropy_top_k": ((None,), LOSSY),
    "draft_load_config": ((None,), "checkpoints are read as safetensors"),
    "moe_backend": ((None,), ONE_BACKEND),
    "attention_backend": ((None,), ONE_BACKEND),
    "kv_cache_dtype": ((None, "auto"), "the cache has the model's dtype"),
    "dspark_draft_topk": ((None,), "a dspark head scores the whole vocabulary"),
    "xpress_topc": ((None,), "xpress is not there"),
    "index_share_for_mtp_iteration": ((None,), "no attention here shares an index"),
}
RULES = {None: AcceptanceRule.AUTO, "standard": AcceptanceRule.AUTO, "block": AcceptanceRule.BLOCK}
# They are keywords like all others, so that what is meant can be said before it is refused.
RefusedFields: Any = make_dataclass(
    "RefusedFields",
    [(name, Any, field(default=values[0], repr=False)) for name, (values, _) in REFUSED.items()],
    kw_only=True,
)


def named_method(method: object) -> str | None:
    """The method that is meant by a value of `method`, None where it is absent; several that draft in turn, a list or
    a text with commas, with commas between them. ValueError for anything else."""
    allowed = f"allowed: the name of a method, or a list of names, of {CHOICES}"
    if method is None:
        return None
    names = split_methods(method) if isinstance(method, str) else method
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"speculative_config['method'] is {method!r:.100}; {allowed}")
    names = [_todays(name) for name in names]
    if problem := list_problem(names):
        raise ValueError(f"speculative_config['method'] {problem}")
    return ",".join(names)


def _todays(name: str) -> str:
    """The name that a method has today."""
    if name.endswith("_mtp"):
        warnings.warn(f"method {name!r}: an old name of 'mtp'", DeprecationWarning, stacklevel=6)
        return "mtp"
    return "ngram" if name in NGRAM_NAMES else name


def method_of_model(model: str | Path) -> str:
    """The method that a model is for, as in vLLM: by its config.json, by its name, else a draft model. `ngram` is no
    model."""
    if str(model) in NGRAM_NAMES:
        return "ngram"
    if isinstance(model, str) and is_class(model) and not Path(model).exists():
        return CUSTOM_CLASS
    config = _checkpoint(model)
    if head := head_of(config):
        return head
    for word, name in WORDS.items():
        said_by_config = config.get("model_type") and name == "mlp_speculator"
        if word in Path(model).name.lower() and not said_by_config:
            return name
    return "draft_model"


def require_method(method: str, model: object = None) -> None:
    """Raises Unsupported for a method that is not there. `model` is named where the method follows from it."""
    missing = MISSING.get(method)
    if missing is not None:
        said = f"speculative method {method!r}" if model is None else f"speculative_config['model'] {str(model)!r:.200}"
        raise Unsupported(f"{said} is {missing.what}: it is not there yet; {INSTEAD}")


def _checkpoint(model: str | Path | None) -> dict[str, Any]:
    """The draft's config.json; empty where there is none."""
    file = Path(model or "") / "config.json"
    if model is None or not file.is_file():
        return {}
    read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return read


def _proposed_tokens(config: Mapping[str, Any]) -> int | None:
    """How many tokens to draft by a config.json of speculators: by the first way that it names, as vLLM reads it."""
    match config:
        case {"speculators_config": {"proposal_methods": [{"speculative_tokens": k}, *_]}} if is_int(k) and k >= 1:
            return int(k)
    return None


def _model(value: object) -> object:
    if not isinstance(value, str | Path | None):
        raise ValueError(f"speculative_config['model'] is {value!r:.100}; allowed: the path of a checkpoint")
    return value


def acceptance_of(rejection_sample_method: object) -> AcceptanceRule:
    """The rule that vLLM's name asks for. Raises Unsupported."""
    if not isinstance(rejection_sample_method, str | None) or rejection_sample_method not in RULES:
        raise Unsupported(f"rejection_sample_method={rejection_sample_method!r:.100}; allowed: standard, block")
    return RULES[rejection_sample_method]


def _in_range(bounds: Range) -> Any:
    low, high = bounds
    return Annotated[Number, Field(ge=low, le=high, description=f"a number in [{low}, {high}]")]


# What a request says to its draft is said here for all requests.
_ForDrafts: Any = make_dataclass(
    "_ForDrafts",
    [(name, _in_range(bounds), getattr(DraftOptions(), name)) for name, bounds in DRAFT_OPTIONS.items()],
    kw_only=True,
)


@plain_errors("speculative_config")
@dataclass(config=CONFIG)
class SpeculativeConfig(_ForDrafts, RefusedFields):  # type: ignore[misc]  # whose fields are made of tables
    """How to draft; vLLM's names. It says what is meant; `require_supported` says what is there. What is refused
    there in any case is taken here as it is."""

    num_speculative_tokens: Annotated[
        Integer | None, Field(ge=1, le=MAX_DRAFT_TOKENS, description=f"1 to {MAX_DRAFT_TOKENS}")
    ] = None
    model: Annotated[str | Path | None, BeforeValidator(_model)] = None
    method: Annotated[str | None, BeforeValidator(named_method)] = None  # several with commas
    draft_tensor_parallel_size: Annotated[Integer | None, integer(1)] = None
    tensor_parallel_size: Any = None  # only to say that it is the other name
    disable_by_batch_size: Annotated[Integer | None, integer(2)] = None
    num_speculative_tokens_per_batch_size: Any = None  # list[tuple[int, int, int]]: first and last size, k
    prompt_lookup_max: Annotated[Integer | None, integer(1)] = None
    prompt_lookup_min: Annotated[Integer | None, integer(1)] = None
    max_model_len: Annotated[Integer | None, integer(1)] = None
    enforce_eager: bool | None = None
    disable_padded_drafter_batch: bool = False
    draft_sample_method: Annotated[str | None, one_of(("greedy", "probabilistic"))] = None  # None: probabilistic, which
    # accepts more; vLLM's default is greedy
    quantization: Annotated[Any, Only(None, "int8", "int4", why=ROUNDED)] = None
    speculative_token_tree: Annotated[str, AfterValidator(TokenTree.checked)] | None = None
    suffix_decoding_max_tree_depth: Annotated[Integer, integer(1)] = 24
    suffix_decoding_max_cached_requests: Annotated[Integer, integer(0)] = 10000
    suffix_decoding_max_spec_factor: Annotated[Number, Field(ge=0, description="a number of at least 0")] = 1.0
    suffix_decoding_min_token_prob: Annotated[Number, Field(ge=0, le=1, description="a number in [0, 1]")] = 0.1
    suffix_store_mb: Annotated[Integer, integer(1)] = 64
    suffix_store_file: str | Path | None = None
    suffix_store_minutes: Annotated[Number, Field(gt=0, description="a number above 0")] = 5.0
    parallel_drafting: bool = False  # method draft_model then is pard, of a draft that was trained for it
    use_heterogeneous_vocab: bool | None = False  # tokenizers that differ are mapped in any case
    rejection_sample_method: Annotated[
        str | None,
        one_of(("standard", "synthetic", "block", "fly")),
        Only(None, "standard", "block", why="the others are lossy; allowed: standard, block"),
    ] = None
    draft_trial: Annotated[str, one_of(("refuse", "warn", "off"))] = "refuse"  # of a head or model that is no draft
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False
    schedule: BatchSchedule = field(init=False, repr=False)  # k by the number of running requests
    is_method_given: bool = field(init=False, repr=False)  # else it follows from the model

    def __post_init__(self) -> None:
        if self.tensor_parallel_size is not None:
            raise ValueError("'tensor_parallel_size' is the target's; for the draft give 'draft_tensor_parallel_size'.")
        self.is_method_given = self.method is not None
        if self.model is not None:
            at_once = self.parallel_drafting and self.method in (None, "draft_model")
            self.model = embedded(self.model, "pard" if at_once else self.method or "draft_model") or self.model
        self.method = self._method()
        for name in self.methods:
            if name not in KNOWN and not is_class(name):
                raise ValueError(f"unknown speculative method {name!r}; there are: {', '.join(KNOWN)}")
            if self.model is None and name != MTP and (MISSING.get(name) or method_of(name)).needs_model:
                raise ValueError(f"method {name!r} needs 'model': the folder of the draft's checkpoint")
        k = self.num_speculative_tokens = self._num_speculative_tokens()
        if k is not None and k > MAX_DRAFT_TOKENS:
            raise must_be(self, "num_speculative_tokens", k)
        if "ngram" in self.methods:
            self._resolve_lookup()
        self._check_together()
        self.schedule = BatchSchedule.of(k or 0, self.disable_by_batch_size, self.num_speculative_tokens_per_batch_size)

    @property
    def methods(self) -> tuple[str, ...]:
        """Those that draft in turn."""
        return split_methods(self.method or "")

    @property
    def head(self) -> str:
        """The method, if it is a head beside the target."""
        return self.method if self.method is not None and self.method in HEADS else ""

    @property
    def tree(self) -> TokenTree | None:
        """What is drafted in place of chains; None where it is a chain."""
        tree = None if self.speculative_token_tree is None else TokenTree.parse(self.speculative_token_tree)
        return None if tree is None or tree.is_chain else tree

    @property
    def drafts_by_model(self) -> bool:
        """Whether any of the methods is a draft model's."""
        return not self.head and needs_model(self.methods)

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """The configuration of a dict as in vLLM; unknown keys are an error."""
        return given if given is None or isinstance(given, SpeculativeConfig) else cls(**given)

    @classmethod
    def supported(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """The configuration of a dict, if this version can do it; a method that it has not is refused before all
        else."""
        if isinstance(given, Mapping):
            given = {**given, "method": named_method(given.get("method"))}
            model = given.get("model")
            if given["method"] is None and isinstance(model, str | Path):
                require_method(method_of_model(model), model)
            for name in split_methods(given["method"] or ""):
                require_method(name)
        config = cls.of(given)
        if config is not None:
            config.require_supported()
        return config

    def require_supported(self) -> None:
        """Raises Unsupported for what this version cannot do, by name."""
        for name in self.methods:
            require_method(name)
        require_fixed(REFUSED | fixed_fields(type(self)), vars(self), "speculative_config[{!r}]")
        if self.draft_tensor_parallel_size not in (None, 1):
            raise ValueError("draft_tensor_parallel_size must be 1 or the target's, 1")
        if self.is_method_given:
            self._require_tree()

    def _require_tree(self) -> None:
        if self.tree is not None and not self.head and self.method != "draft_model":
            raise Unsupported(
                f"speculative_config['speculative_token_tree'] is a tree, and method {self.method} drafts chains; "
                f"allowed: a chain, or one of draft_model, {', '.join(sorted(HEADS))}"
            )

    def located(self, target: Path, trust_remote_code: bool = False) -> SpeculativeConfig:
        """With the folder in place of a hub id, and what is said there: the method, where it was not given, how many
        tokens a head predicts, and whether in one pass. Raises ModelNotFound, ValueError."""
        if not needs_model(self.methods):
            return self
        own = own_draft(self.model)
        folder = target if own else locate(str(self.model or target), trust_remote_code=trust_remote_code)
        if not folder.is_dir():
            raise ValueError(
                f"speculative_config: there is no folder {folder}; allowed: a folder, or a hub id (org/name)"
            )
        said = _checkpoint(folder)
        method = (None if self.is_method_given else head_of(said)) or self.method
        is_parallel = self.parallel_drafting or (method == "eagle3" and drafts_at_once(said))
        config = replace(self, model=folder, method=method, parallel_drafting=is_parallel)
        if own is not None:
            config = replace(config, quantization=own)
        if config.num_speculative_tokens is None:
            raise ValueError(NO_K)
        config._require_tree()
        return config

    def _method(self) -> str:
        """As in vLLM: given, else by the model's name or its config.json, else a draft model."""
        method = self.method
        if method in NGRAM_NAMES or (method is None and str(self.model) in NGRAM_NAMES):
            if self.parallel_drafting:
                raise ValueError("parallel_drafting is for draft models, not for method 'ngram'")
            self.model = None
            return "ngram"
        if method is None and self.model is None:
            raise ValueError("speculative_config needs 'method' or 'model'")
        method = method or method_of_model(str(self.model))
        if self.parallel_drafting:
            names = split_methods(method)
            if method in ("eagle", "eagle3", *BLOCKS):
                return method
            if not {"draft_model", "pard"}.intersection(names):
                raise ValueError(f"parallel_drafting is for draft models, not for method {method!r}")
            return ",".join("pard" if name == "draft_model" else name for name in names)
        if method != CUSTOM_CLASS:
            return method
        own, self.model = str(self.model), None
        if not is_class(own):
            raise ValueError(f"speculative_config['model'] is {own!r:.100}; allowed: package.module.Class")
        return own

    def _num_speculative_tokens(self) -> int | None:
        """k. Some methods have one of their own; heads say in their config.json how many tokens they predict (k is that
        many, or a multiple), or how many to draft. A hub id says nothing before its folder is there."""
        k = self.num_speculative_tokens
        if self.speculative_token_tree is not None:
            return k or len(TokenTree.parse(self.speculative_token_tree))
        if self.method == "suffix" and k is None:
            k = min(self.suffix_decoding_max_tree_depth, MAX_DRAFT_TOKENS)
        said = _checkpoint(self.model) if self.head or self.method in MISSING else {}
        n_predict = said.get("num_nextn_predict_layers" if self.method == MTP else "n_predict")
        if isinstance(n_predict, int) and n_predict >= 1:
            if k is not None and k > n_predict and k % n_predict:
                raise ValueError(f"num_speculative_tokens={k} must be divisible by the draft's n_predict={n_predict}")
            k = k or n_predict
        k = k or _proposed_tokens(said) or block_tokens(said)
        is_to_come = self.method in (MTP, "mlp_speculator")  # whose checkpoints say it
        if k is None and not is_to_come and not (self.head and is_hub_id(str(self.model))):
            raise ValueError(NO_K)
        return k

    def _resolve_lookup(self) -> None:
        """One bound that is absent copies the other; both are 5 without either."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        self.prompt_lookup_min = least or most or 5
        self.prompt_lookup_max = most or least or 5
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be <= prompt_lookup_max={self.prompt_lookup_max}"
            )

    def _check_together(self) -> None:
        """Fields that need or exclude one another. Raises ValueError."""
        if self.tree is not None and self.rejection_sample_method == "block":
            raise ValueError("rejection_sample_method='block' is for chains; speculative_token_tree is a tree")
        if self.use_heterogeneous_vocab and not self.drafts_by_model:
            raise ValueError("use_heterogeneous_vocab is for draft models")
        if self.draft_confidence and self.head not in ("", "dspark"):
            raise ValueError(f"draft_confidence={self.draft_confidence} is for draft models, and for method 'dspark'")
        if self.quantization is not None and not self.drafts_by_model:
            raise ValueError(f"quantization={self.quantization!r:.100} is for draft models")
