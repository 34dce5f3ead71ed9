"""Models of the Hugging Face hub: an id, `org/name` or `org/name@revision`, wherever a checkpoint's folder may stand.

huggingface_hub keeps them in its cache and downloads what is not there, with a progress bar. Its variables hold:
HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS."""

from __future__ import annotations

import re
from pathlib import Path

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\S+))?")
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
WEIGHTS = ("*.safetensors",)
CODE = ("*.py",)  # only where it may run
ELSEWHERE = ("*/*", "consolidated*")  # other formats' folders, and Mistral's second copy of the weights


class ModelNotFound(ValueError):
    """Neither a folder nor a model that the hub or its cache gives us; the message says why."""


def is_hub_id(model: str | Path) -> bool:
    """Whether it names a model of the hub: it looks like an id, and there is no such folder."""
    return HUB_ID.fullmatch(str(model)) is not None and not Path(model).is_dir()


def locate(model: str | Path, *, weights: bool = True, trust_remote_code: bool = False) -> Path:
    """The folder of a model: of the hub's in the cache, after its download; any other path as it is. Without `weights`
    the tokenizer's files and the configuration will do. Raises ModelNotFound."""
    found = HUB_ID.fullmatch(str(model))
    if found is None or not is_hub_id(model):
        return Path(model)
    # Only here, because it takes a third of a second.
    from huggingface_hub import snapshot_download

    patterns = [*TOKENIZER_FILES, *(WEIGHTS if weights else ()), *(CODE if trust_remote_code else ())]
    try:
        folder = snapshot_download(
            found["repo"], revision=found["revision"], allow_patterns=patterns, ignore_patterns=list(ELSEWHERE)
        )
    except (OSError, ValueError) as error:  # of the network, the hub, the disk; an id that it does not allow
        raise ModelNotFound(f"{model}: there is no such folder, and {_reason(error, found['repo'])}") from error
    return Path(folder)


def model_name(folder: Path) -> str:
    """What to serve it as: the folder's name; in the hub's cache (models--ORG--NAME/snapshots/COMMIT) the id."""
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
