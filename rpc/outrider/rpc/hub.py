"""What stands where a checkpoint's folder may: the embedded pair's name, `python` (or `python/PART`), a GGUF file, and
an id of the Hugging Face hub, `org/name` or `org/name@revision`; of GGUF files there `org/name:Q4_K_M`.

huggingface_hub keeps them in its cache and downloads what is not there, with a progress bar. Its variables hold:
HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from outrider.gguf.folder import SUFFIX, folder_of, gguf_name, gguf_of
from outrider.gguf.header import SPLIT_NAME
from outrider.pairs import name_of, part_path

HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<kind>[A-Za-z0-9][\w.-]*))?(@(?P<revision>\S+))?"
)
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
WEIGHTS, INDEX, ANY = "model.safetensors", "model.safetensors.index.json", "*.safetensors"
OWN: Mapping[str, Literal["int8", "int4"]] = {"self:int8": "int8", "self:int4": "int4"}
CODE = ("*.py",)  # only where it may run
PROJECTOR = "mmproj"  # of pictures, beside a model
MOST_NAMED = 12  # files in an error
ELSEWHERE = ("*/*", "consolidated*")  # other formats' folders, and Mistral's second copy of the weights


class ModelNotFound(ValueError):
    """Neither a folder nor a model that the hub or its cache gives us; the message says why."""


def own_draft(model: str | Path | None) -> Literal["int8", "int4"] | None:
    """The bits to which a target's own weights are rounded, to draft for it: of `self:int4` or `self:int8`; None for
    any other model."""
    return OWN.get(str(model))


def is_hub_id(model: str | Path) -> bool:
    """Whether it names a model of the hub: it looks like an id, and there is no such folder."""
    return HUB_ID.fullmatch(str(model)) is not None and not Path(model).is_dir() and embedded(model) is None


def embedded(model: str | Path, drafts_by: str = "") -> Path | None:
    """The folder of the embedded pair that a name stands for, unless a folder of that name is there: `python` its
    target, or what drafts by the first of these methods (with commas) that it has something for."""
    if Path(model).is_dir():
        return None
    parts = (part_path(str(model), method) for method in drafts_by.split(","))
    return next((part for part in parts if part is not None), None)


def locate(model: str | Path, *, weights: bool = True, trust_remote_code: bool = False, drafts_by: str = "") -> Path:
    """The folder of a model: the embedded pair's by its name (see `embedded`); of the hub's in the cache, after its
    download; a GGUF file's in the cache (see gguf.folder); any other path as it is. Without `weights` the tokenizer's
    files and the configuration will do. Raises ModelNotFound, of a GGUF file with what is wrong in it."""
    if (part := embedded(model, drafts_by)) is not None:
        return part
    try:
        if (file := gguf_of(model)) is not None:
            return folder_of(file)
    except (ValueError, OSError) as error:  # WrongGguf is one
        raise ModelNotFound(str(error)) from error
    found = HUB_ID.fullmatch(str(model))
    if found is None or not is_hub_id(model):
        return Path(model)
    if found["kind"]:
        return _locate_gguf(str(model), found["repo"], found["revision"], found["kind"])
    # Only here, because it takes a third of a second.
    from huggingface_hub import snapshot_download

    def download(patterns: Sequence[str], revision: str | None) -> Path:
        wanted, left_out = list(patterns), list(ELSEWHERE)
        return Path(
            snapshot_download(found["repo"], revision=revision, allow_patterns=wanted, ignore_patterns=left_out)
        )

    try:
        folder = download([*TOKENIZER_FILES, *(CODE if trust_remote_code else ())], found["revision"])
        if weights:
            _download_weights(folder, lambda patterns: download(patterns, folder.name))  # the same commit's
    except (OSError, ValueError) as error:  # of the network, the hub, the disk; an id that it does not allow
        reason = _reason(error, found["repo"])
        raise ModelNotFound(f"{model}: there is no such folder, and {reason}") from None  # which says what theirs do
    return folder


def _locate_gguf(model: str, repo: str, revision: str | None, kind: str) -> Path:
    """The folder that stands for a repository's only GGUF model of a kind, all parts of which are downloaded."""
    from huggingface_hub import errors, snapshot_download

    try:
        try:
            there = snapshot_download(repo, revision=revision, allow_patterns=[f"*{SUFFIX}"], dry_run=True)
            names = [one.filename for one in there]
        except errors.DryRunError:  # no hub is reached
            cached = Path(snapshot_download(repo, revision=revision, allow_patterns=[]))
            names = [str(file.relative_to(cached)) for file in cached.rglob(f"*{SUFFIX}")]
        parts = parts_of_kind(names, kind)
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=parts))
    except WrongKind as error:
        raise ModelNotFound(f"{model}: {repo} {error}") from None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{model}: there is no such folder, and {_reason(error, repo)}") from None
    return locate(folder / parts[0])


class WrongKind(Exception):
    """No GGUF file is of a kind, or several are."""


def parts_of_kind(names: Sequence[str], kind: str) -> list[str]:
    """Of the names of GGUF files those of the only model whose name ends in the kind, as in llama.cpp in either case.
    Raises WrongKind, which says which there are."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        split = SPLIT_NAME.fullmatch(Path(name).name)
        stem = split[1] if split else Path(name).name.removesuffix(SUFFIX)
        if not stem.startswith(PROJECTOR):
            models.setdefault(str(Path(name).with_name(stem)), []).append(name)
    ending = re.compile(rf"(.*[-._/])?{re.escape(kind)}", re.IGNORECASE)
    found = [stem for stem in models if ending.fullmatch(stem)]
    if len(found) == 1:
        return models[found[0]]
    shown = sorted(found or models)
    more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    there = ", ".join(shown[:MOST_NAMED]) + more
    if found:
        raise WrongKind(f"has {len(found)} GGUF models of the kind {kind}: {there}")
    raise WrongKind(f"has no GGUF model of the kind {kind}; it has {there or 'none of any kind'}")


def _download_weights(folder: Path, download: Callable[[Sequence[str]], object]) -> None:
    """Those that will be read (the loader's rule, in engine/checkpoint.py), and no others. What is complete is not
    asked for again."""
    named = _read(folder / "config.json").get("transformers_weights")
    entry = named if isinstance(named, str) else INDEX
    weight_map = _read(folder / entry).get("weight_map") if entry.endswith(".json") else {entry: entry}
    parts = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    if named is None and (folder / WEIGHTS).is_file():
        return
    if parts and all((folder / part).is_file() for part in parts):
        return
    if named is None:
        download([WEIGHTS])
        if (folder / WEIGHTS).is_file():
            return
    download(parts or [ANY])  # a draft or a head may be one file of any name


def _read(path: Path) -> dict[str, Any]:
    """An object; empty for what is none, which the loader refuses."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def model_name(folder: Path) -> str:
    """What to serve it as: the folder's name; in the hub's cache (models--ORG--NAME/snapshots/COMMIT) the id; of the
    embedded pair its own (see `embedded`); of a GGUF file its name without the ending."""
    if name := name_of(folder) or gguf_name(folder):
        return name
    folder = folder.resolve()
    repo = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    return repo.removeprefix("models--").replace("--", "/", 1) if repo.startswith("models--") else folder.name


def _reason(error: Exception, repo: str) -> str:
    """Why the hub gives no model of that id."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"access to {repo} is granted at {hub}/{repo}: ask for it there, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has no model {repo}; a private one needs HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} at {hub} has no such revision"
    if isinstance(error, errors.LocalEntryNotFoundError):
        cache = constants.HF_HUB_CACHE
        if constants.HF_HUB_OFFLINE:
            return f"{repo} is not in the cache {cache}; HF_HUB_OFFLINE allows no download"
        return f"{repo} is not in the cache {cache}, and {hub} cannot be reached"
    return f"{repo} cannot be had from {hub}: {' '.join(str(error).split())}"
