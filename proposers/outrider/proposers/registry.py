"""The methods of drafting, one row each: services, gateway, `LLM` and the command line read here what they offer. What
a method needs is imported when it is built, so that the gateway reads this file without torch."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from outrider.proposers.base import TokenProposer
from outrider.rpc.words.request import split_methods


class NgramSettings(BaseModel):
    """What prompt lookup is told."""

    prompt_lookup_min: int | None = Field(None, ge=1, description="shortest n-gram that is looked up (default: 5)")
    prompt_lookup_max: int | None = Field(None, ge=1, description="longest n-gram that is looked up (default: 5)")


class SuffixSettings(BaseModel):
    """What suffix decoding is told: vLLM's names, but for the store's."""

    suffix_decoding_max_tree_depth: int = Field(
        24, ge=1, le=1024, description="most tokens of a context that is looked up, and of a draft"
    )
    suffix_decoding_max_cached_requests: int = Field(
        10_000, ge=0, description="most finished requests in the store; 0: a request drafts from its own text alone"
    )
    suffix_decoding_max_spec_factor: float = Field(
        1.0, ge=0, description="most drafted tokens for each token of context that matched"
    )
    suffix_decoding_min_token_prob: float = Field(
        0.1, ge=0, le=1, description="a draft ends before a token whose path has a lower share of what followed"
    )
    suffix_store_mb: int = Field(64, ge=1, le=4096, description="most memory of the store, in MiB")
    suffix_store_file: Path | None = Field(
        None, description="file that keeps the store between two runs: outputs in plain text, its owner's to read"
    )
    suffix_store_minutes: float = Field(
        5.0,
        gt=0,
        description="minutes between two writes of suffix-store-file; a sudden end loses what came since the last",
    )


class MethodSettings(NgramSettings, SuffixSettings):
    """What a process is told that drafts: the settings of every method."""

    subjects: ClassVar[Mapping[str, str]] = {"allow_code": "methods without a model"}

    allow_code: bool = Field(
        False, description="a method may be package.module.Class: your own class, imported and run in this process"
    )


@dataclass(frozen=True, slots=True)
class DraftingMethod:
    """A way of drafting."""

    name: str
    summary: str  # of what it drafts from
    factory: str  # module:Class. Without a model a TokenProposer, made of its settings; else `of` the model's runner
    settings: type[BaseModel] = BaseModel
    needs_model: bool = False
    needs_features: bool = False  # the target's hidden states
    one_hot: bool = True  # drafts carry no weights
    can_run_ahead: bool = True  # it can draft past a verification under way
    learns: bool = False  # from finished sequences, others' too: there only where it is the one asked for

    def load(self) -> Any:
        """The factory, which is imported now."""
        module, _, name = self.factory.partition(":")
        return getattr(importlib.import_module(module), name)


_ROWS = (
    DraftingMethod(
        "draft_model",
        "any small model; it may have another tokenizer than the target",
        "outrider.proposers.draft_model:DraftModelProposer",
        needs_model=True,
        one_hot=False,
    ),
    DraftingMethod(
        "ngram",
        "n-gram lookup in the text so far, without a model",
        "outrider.proposers.ngram:NgramProposer",
        NgramSettings,
    ),
    DraftingMethod(
        "suffix",
        "lookup in the text so far and in earlier answers, without a model",
        "outrider.proposers.suffix.proposer:SuffixProposer",
        SuffixSettings,
        learns=True,
    ),
    DraftingMethod(
        "prediction",
        "the request's own guess at the answer (its field prediction), without a model",
        "outrider.proposers.prediction:PredictionProposer",
    ),
    DraftingMethod(
        "pard",
        "a small model that was trained to give all tokens of a window in one pass",
        "outrider.proposers.pard:PardProposer",
        needs_model=True,
        one_hot=False,
    ),
)
METHODS: Mapping[str, DraftingMethod] = {row.name: row for row in _ROWS}  # of a draft


def _head(name: str, summary: str) -> DraftingMethod:
    """A head drafts in the target's process (`outrider target --head`), from the states that its steps leave; its
    factory is for the loader of heads, which knows the layouts."""
    factory = "outrider.proposers.heads.loading:load_head"
    return DraftingMethod(
        name, summary, factory, needs_model=True, needs_features=True, one_hot=False, can_run_ahead=False
    )


HEADS: Mapping[str, DraftingMethod] = {
    row.name: row
    for row in (
        _head("eagle", "a decoder layer beside the target that goes on from its last hidden states"),
        _head("eagle3", "a decoder layer beside the target that reads hidden states of three of its layers"),
        _head("medusa", "a head beside the target for each of the next tokens, from its last hidden state"),
        _head("mlp_speculator", "small layers beside the target, one for each next token, from its last hidden state"),
        _head("mtp", "a layer for the token after next that was trained with the target"),
        _head("dflash", "layers beside the target that draft a block in one pass, from states of several layers"),
        _head("dspark", "a block drafter whose tokens follow one another, and which tells how sure it is"),
    )
}
BLOCKS = ("dflash", "dspark")  # heads that draft a block in one pass
TOKEN_METHODS = tuple(row.name for row in _ROWS if not row.needs_model)
CHOICES = ", ".join(METHODS)

MethodNames = Annotated[
    str,
    Field(
        description=f"how drafts are made by default: {CHOICES}, or package.module.Class; several with commas, as "
        "prediction,suffix,draft_model: of these the first that has something drafts, then what was measured to be best"
    ),
]


PEAGLE = "peagle"  # what speculators and vLLM call a P-EAGLE head: an EAGLE-3 one that drafts all tokens in one pass


def is_dflash2(config: Mapping[str, Any]) -> bool:
    """Whether a block drafter's config.json says that it is DFlash2."""
    architecture = " ".join(config.get("architectures") or ()).lower()
    return config.get("speculators_model_type") == "dflash2" or "dflash2" in architecture


def head_of(config: Mapping[str, Any], names: Collection[str] = ()) -> str | None:
    """The method of a head by its config.json and the names of its tensors; None for what is no head. The layouts tell
    it in many ways: by model_type, by the architecture's name, by a field or a tensor that no other has."""
    for said in (config.get("speculators_model_type"), config.get("model_type")):
        if said == PEAGLE:
            return "eagle3"
        if said == "dflash2":
            return "dflash"
        if said in HEADS:
            return str(said)
    if str(config.get("model_type")).endswith("_mtp"):
        return "mtp"
    architecture = " ".join(config.get("architectures") or ()).lower()
    words = (("eagle3", "eagle3"), (PEAGLE, "eagle3"), ("eagle", "eagle"), ("dflash", "dflash"), ("dspark", "dspark"))
    for word, method in words:
        if word in architecture:
            return method
    fields = {"medusa_num_heads": "medusa", "num_nextn_predict_layers": "mtp"}
    found = next((method for field, method in fields.items() if config.get(field)), None)
    if found is None and ("d2t" in names or any("midlayer." in name for name in names)):
        return "eagle3"
    return "eagle" if found is None and "fc.weight" in names else found


def samples_anchor(config: Mapping[str, Any], by_default: bool) -> bool:
    """Whether a block's first row, the last token's, gives a token, by a block drafter's config.json."""
    own = config.get("dflash_config") or {}
    if (bonus := own.get("dspark_bonus_anchor", config.get("dspark_bonus_anchor"))) is not None:
        return not bonus
    return bool(own.get("sample_from_anchor", config.get("sample_from_anchor", by_default)))


def block_size(config: Mapping[str, Any]) -> Any:
    """The rows of a block, by a block drafter's config.json; None where nothing is said."""
    own = config.get("dflash_config") or {}
    return own.get("block_size", config.get("block_size", config.get("dspark_block_size")))


def block_tokens(config: Mapping[str, Any]) -> int | None:
    """How many tokens a block gives, by config.json; None for what is no block drafter."""
    method, rows = head_of(config), block_size(config)
    if method not in BLOCKS or type(rows) is not int:
        return None
    return rows if samples_anchor(config, method == "dspark") else rows - 1


def drafts_at_once(config: Mapping[str, Any]) -> bool:
    """Whether a head's config.json says that it drafts all tokens in one pass; P-EAGLE's do."""
    return bool(config.get("parallel_drafting")) or config.get("speculators_model_type") == PEAGLE


def is_class(name: str) -> bool:
    """Whether it names a class, as package.module.Class."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def method_of(name: str) -> DraftingMethod:
    """The row of a method; a class of the user's own has none in the table, and no model."""
    return METHODS.get(name) or HEADS.get(name) or DraftingMethod(name, "a class of your own", "")


def check_method(name: str, allow_code: bool) -> str:
    """The name, if there is such a method. Raises ValueError."""
    if is_class(name) and not allow_code:
        raise ValueError(f"{name} is a class whose code would run here: allowed with allow_code (--allow-code) alone")
    if name in HEADS:
        raise ValueError(
            f"{name} is a head, which drafts beside the target (outrider target --head); allowed: {CHOICES}"
        )
    if name not in METHODS and not is_class(name):
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"there is no method {name!r:.100}: {hint}allowed: {CHOICES}, or package.module.Class")
    return name


def list_problem(names: Sequence[str]) -> str:
    """What is wrong with a list of methods that draft in turn, whatever they are; empty: nothing."""
    if not names:
        return "names none; allowed: at least one method"
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"names {twice!r:.100} twice; allowed: each method once"
    if len(names) > 1 and (head := next((name for name in names if name in HEADS), None)):
        return f"names {head!r}, which drafts beside the target; allowed: that alone, or methods of a draft"
    models = [name for name in names if method_of(name).needs_model]
    if len(models) > 1:
        return f"names {' and '.join(models)}, which need a model each; allowed: one of these, and methods without"
    return ""


def needs_model(names: Iterable[str]) -> bool:
    """Whether any of them does."""
    return any(method_of(name).needs_model for name in names)


def check_methods(text: str, allow_code: bool) -> tuple[str, ...]:
    """One method, or several with commas between them, in the order in which they are tried. Raises ValueError."""
    names = split_methods(text)
    if problem := list_problem(names):
        raise ValueError(f"method {problem}")
    return tuple(check_method(name, allow_code) for name in names)


def make_proposer(name: str, settings: Mapping[str, Any], allow_code: bool = False) -> TokenProposer:
    """A method without a model, set up by those of the settings that are its own; or a class of the user's, made
    without arguments. Raises ValueError."""
    check_method(name, allow_code)
    if is_class(name):
        return _own_class(name)
    row = METHODS[name]
    proposer: TokenProposer = row.load()(**{key: settings[key] for key in row.settings.model_fields if key in settings})
    return proposer


def _own_class(path: str) -> TokenProposer:
    module, _, name = path.rpartition(".")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} cannot be used as a method: {error}") from error
    if not callable(getattr(made, "open", None)) or not isinstance(getattr(made, "name", None), str):
        raise ValueError(f"{path} is no method: allowed: a class with a name and open(), as TokenProposer has them")
    if made.name in METHODS or not made.name:
        raise ValueError(f"{path} has the name {made.name!r:.100}; allowed: one of its own, not of {CHOICES}")
    proposer: TokenProposer = made
    return proposer
