"""Reads a Hugging Face checkpoint folder: JSON and safetensors, never a pickle; in the folder that stands for a GGUF
file that file.

What a model's weights are: the SHA-256 of their contents, taken while they are loaded.

The digest is of names, types, shapes and contents: the same weights in other files have the same one.
hashlib lets go of the interpreter, so threads of its own read ahead of whoever loads. A checkpoint's digest is kept for
the next start, beside the checkpoint or in the user's cache, under what says that its files are still the same. A
folder that was copied has other inodes and times of change: what was copied with it is not believed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.gguf_state import GgufState
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.quantized.state import QuantizedTensors, layout_of, said_of
from outrider.engine.sampler import OFF
from outrider.gguf import folder as gguf_folder
from outrider.gguf.header import WrongGguf, read_gguf, read_part

log = logging.getLogger(__name__)

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
WEIGHTS_NAME, INDEX_NAME = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
ADAPTER_CONFIG = "adapter_config.json"  # of an adapter that was saved beside its model
SAMPLING_KEYS = (*OFF, "repetition_penalty")
MAX_JSON_BYTES = 64 << 20
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as its library has it
MASK_FIELDS = ("pard_token", "ptd_token_id")  # PARD's own, and vLLM's other name
# What transformers obeys beside SAMPLING_KEYS, the values that ask for nothing, and a request's own word for it.
OTHER_RULES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "suppress_tokens": ((None, []), "bad_words or logit_bias"),
    "begin_suppress_tokens": ((None, []), ""),
    "bad_words_ids": ((None, []), "bad_words"),
    "sequence_bias": ((None, [], {}), "logit_bias"),
    "min_new_tokens": ((None, 0), "min_tokens"),
    "min_length": ((None, 0), "min_tokens"),
    "forced_bos_token_id": ((None,), ""),
    "forced_eos_token_id": ((None,), ""),
    "no_repeat_ngram_size": ((None, 0), ""),
    "typical_p": ((None, 1), ""),
    "epsilon_cutoff": ((None, 0), ""),
    "eta_cutoff": ((None, 0), ""),
    "guidance_scale": ((None, 1), ""),
    "exponential_decay_length_penalty": ((None,), ""),
    "num_beams": ((None, 1), ""),
    "stop_strings": ((None, [], ""), "stop"),
}
CACHE_NAME = ".outrider-digest"
VERSION = 1  # of the cache's contents and of what is hashed
NUM_THREADS = 4
CHUNK_BYTES = 1 << 18
SETTLED_NS = 2_000_000_000  # a file that changed later may change again within one tick of its file system's clock


def read_json(path: Path) -> dict[str, Any]:
    """An object, or an empty one where the file is absent. Raises WrongCheckpoint."""
    if not path.is_file():
        return {}
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise WrongCheckpoint(f"{path} has {size} bytes; allowed: at most {MAX_JSON_BYTES}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WrongCheckpoint(f"{path} holds no JSON: {error}") from error
    if not isinstance(value, dict):
        raise WrongCheckpoint(f"{path} does not hold a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json."""
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} holds no config.json")
    return read_json(folder / "config.json")


def weights_entry(folder: Path, lone: bool = False) -> str:
    """The name of the file that transformers would take a model's weights from, or of the index of such files: what
    config.json's transformers_weights names, else model.safetensors, else its index; or of the first part of a GGUF
    file. `lone` is for drafts and heads, whose folders may hold one file of any name. Raises UnsupportedModel
    (WrongCheckpoint) where there is none."""
    named = read_json(folder / "config.json").get("transformers_weights")
    if named is not None:
        if not (isinstance(named, str) and named.endswith((SUFFIX, INDEX_SUFFIX)) and _is_beside(folder, named)):
            allowed = f"a file beside it that ends in {SUFFIX} or {INDEX_SUFFIX}"
            raise WrongCheckpoint(
                f"{folder / 'config.json'}: transformers_weights: is {named!r:.100}; allowed: {allowed}"
            )
        return named
    found = next((name for name in (WEIGHTS_NAME, INDEX_NAME) if (folder / name).is_file()), None)
    if found is None:
        found = gguf_folder.weights_entry(folder)
    if found is not None:
        return found
    others = _names(folder, f"*{SUFFIX}")
    if lone and len(others) == 1:
        return others[0]
    if _names(folder, "*.bin") and (not others or _names(folder, "pytorch_model*.bin")):
        raise UnsupportedModel(
            f"{folder} holds its weights as .bin, which are pickles: run `outrider model convert {folder} NEW` first"
        )
    if not others:
        raise UnsupportedModel(f"{folder} holds no {SUFFIX} weights")
    raise UnsupportedModel(
        f"{folder} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}; {few(others)} may be of something else: give shards "
        f"the index that was saved with them, and a file that is the whole model the name {WEIGHTS_NAME}"
    )


def weight_files(folder: Path, lone: bool = False) -> tuple[Path, ...]:
    """The files of `weights_entry`, in order of name. Raises what it raises, and WrongCheckpoint where an index names
    one that is absent."""
    entry = weights_entry(folder, lone)
    if _is_gguf(folder / entry):
        with told():
            return read_gguf(folder / entry).files
    if not entry.endswith(INDEX_SUFFIX):
        return (folder / entry,)
    index = read_json(folder / entry).get("weight_map")
    if not (isinstance(index, dict) and index and all(isinstance(name, str) for name in index.values())):
        raise WrongCheckpoint(f"{folder / entry}: weight_map is no object of file names")
    names = sorted(set(index.values()))
    if absent := [name for name in names if not _is_beside(folder, name)]:
        raise WrongCheckpoint(f"{folder / entry} names files that are not beside it: {few(absent)}")
    return tuple(folder / name for name in names)


def left_aside(folder: Path, lone: bool = False) -> list[str]:
    """What lies beside the weights and could be taken for weights or for what changes them."""
    used = {weights_entry(folder, lone), *(path.name for path in weight_files(folder, lone))}
    return [name for name in _names(folder, f"*{SUFFIX}", f"*{INDEX_SUFFIX}", ADAPTER_CONFIG) if name not in used]


def tell_left_aside(folder: Path, lone: bool = False) -> None:
    """One line of the log, where there is anything."""
    if names := left_aside(folder, lone):
        log.warning("%s: weights are read from %s alone, not from %s", folder, weights_entry(folder, lone), few(names))


def _is_beside(folder: Path, name: str) -> bool:
    return Path(name).name == name and (folder / name).is_file()


def _names(folder: Path, *patterns: str) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def few(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_gguf(path: Path) -> bool:
    return path.suffix == gguf_folder.SUFFIX


@contextmanager
def told() -> Iterator[None]:
    """What is wrong with a GGUF file is a WrongCheckpoint."""
    try:
        yield
    except WrongGguf as error:
        raise WrongCheckpoint(str(error)) from error


def read_tensors(files: tuple[Path, ...], ending: str | tuple[str, ...] = "") -> Mapping[str, Tensor]:
    """All tensors, or those whose names end so, mapped from the files, or decoded when they are asked for. Raises
    WrongCheckpoint."""
    if _is_gguf(files[0]):
        with told():
            lazy = GgufState(read_gguf(files[0]))
        return {name: lazy[name] for name in lazy if name.endswith(ending)} if ending else lazy
    state: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if not name.endswith(ending):
                        continue
                    if name in state:
                        raise WrongCheckpoint(f"{path} holds {name} a second time")
                    state[name] = opened.get_tensor(name)
        except (SafetensorError, RuntimeError) as error:
            raise WrongCheckpoint(f"{path} is damaged or cut off: {error}") from error
    return state


def read_weights(folder: Path, files: tuple[Path, ...]) -> Mapping[str, Tensor]:
    """A model's tensors, of a quantised one decoded when they are asked for. Raises WrongCheckpoint, and
    UnsupportedModel for a way of quantising that is not served."""
    said = said_of(read_config(folder))
    layout = None if said is None else layout_of(said)
    return read_tensors(files) if layout is None else QuantizedTensors(layout, read_tensors(files))


def eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids: those of generation_config.json before those of config.json. Raises WrongCheckpoint."""
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise WrongCheckpoint(f"eos_token_id: is {given!r:.100}; allowed: a token id, or a list of them")
    return tuple(ids)


def mask_token_id(config: Mapping[str, Any]) -> int | None:
    """The mask token of a model that was trained to draft in parallel; None for any other. Raises WrongCheckpoint."""
    name, value = next(((name, config[name]) for name in MASK_FIELDS if config.get(name) is not None), ("", None))
    if value is None:
        return None
    vocab_size = config.get("vocab_size", 0)
    if not (isinstance(value, int) and isinstance(vocab_size, int) and 0 <= value < vocab_size):
        raise WrongCheckpoint(f"config.json: {name} is {value!r}; allowed: an id below vocab_size, {vocab_size}")
    return value


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """What config.json says that the weights are, in the words of any version of transformers: "float16", ..."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    return next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None), None)


def default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters that the model's authors recommend. Raises WrongCheckpoint."""
    found = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    for key, value in found.items():
        if type(value) not in (int, float):
            raise WrongCheckpoint(f"generation_config.json: {key} is {value!r:.100}; allowed: a number")
    return found


def unheeded_rules(generation: Mapping[str, Any]) -> str:
    """What a generation_config.json asks for that is not done unless a request says so itself; empty: nothing."""
    found = [name for name, (neutral, _) in OTHER_RULES.items() if generation.get(name) not in neutral]
    own = [f"{name}: {OTHER_RULES[name][1]}" for name in found if OTHER_RULES[name][1]]
    instead = f"; a request asks for it by its own fields ({', '.join(own)})" if own else ""
    return f"generation_config.json: {', '.join(found)} has no effect{instead}" if found else ""


_FileKey = list[str | int]  # path, size, mtime_ns, ctime_ns, inode
_Pending = tuple[list[Any], "Future[str]"]  # name, type in safetensors' words and shape of a tensor; its digest


def model_digest(config: Mapping[str, Any], weights: str, rounding: str | None = None) -> str:
    """SHA-256, in hex, of the configuration that is computed and of the digest of the weights that it is computed from:
    of an expansion, which is made from small ones by a fixed rule, these are the small ones. `rounding` is what is done
    to them as they are loaded: what is computed then is another model."""
    return _sha256_of([config, weights] if rounding is None else [config, weights, rounding])


@contextmanager
def checkpoint_digest(folder: Path, files: tuple[Path, ...]) -> Iterator[Callable[[], str]]:
    """Hashes while the body of `with` loads; what it is given waits for the end. Raises WrongCheckpoint if the files
    changed meanwhile."""
    keys = list(map(_file_key, files))
    known = _recall(folder, keys)
    pool = ThreadPoolExecutor(NUM_THREADS, "digest")

    def result() -> str:
        digest = known or _combined(pending)
        if list(map(_file_key, files)) != keys:
            raise WrongCheckpoint(f"{folder}: its weights changed while they were read; load it again")
        if known is None:
            _remember(folder, keys, digest)
        return digest

    try:
        pending = [] if known else [entry for path in files for entry in _submit_file(pool, path)]
        yield result
    finally:
        pool.shutdown(cancel_futures=True)  # a model that is refused needs no digest


def _submit_file(pool: ThreadPoolExecutor, path: Path) -> Iterator[_Pending]:
    """Reads a file by the header of its kind. Safetensors': its length, JSON, then the contents at offsets from its
    end."""
    if _is_gguf(path):
        with told():
            _, places = read_part(path)
        for place in places:
            facts = [place.name, place.kind.name, list(place.shape)]
            yield facts, pool.submit(_hash_range, path, place.start, place.start + place.num_bytes)
        return
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            if length > MAX_HEADER_BYTES:
                raise ValueError
            header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            entries = sorted(
                (*_offsets(*entry["data_offsets"]), name, entry["dtype"], entry["shape"])
                for name, entry in header.items()
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise WrongCheckpoint(f"{path} has no header of safetensors: it is damaged or cut off") from None
    for start, end, *facts in entries:
        yield facts, pool.submit(_hash_range, path, 8 + length + start, 8 + length + end)


def _offsets(start: Any, end: Any) -> tuple[int, int]:
    if not (type(start) is type(end) is int and 0 <= start <= end):
        raise ValueError
    return start, end


def _hash_range(path: Path, start: int, end: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as opened:
        opened.seek(start)
        while start < end and (chunk := opened.read(min(CHUNK_BYTES, end - start))):
            digest.update(chunk)
            start += len(chunk)
    return digest.hexdigest()


def _combined(pending: Sequence[_Pending]) -> str:
    return _sha256_of(sorted([*facts, future.result()] for facts, future in pending))


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _file_key(path: Path) -> _FileKey:
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _cache_files(folder: Path) -> Iterator[Path]:
    """Where a digest may be kept, the first choice first."""
    yield folder / CACHE_NAME
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return
    yield caches / "outrider" / "digests" / _sha256_of(str(folder.resolve()))


def _recall(folder: Path, keys: list[_FileKey]) -> str | None:
    for path in _cache_files(folder):
        try:
            kept = json.loads(path.read_bytes())
        except (OSError, ValueError):  # absent, not readable or damaged
            continue
        if isinstance(kept, dict) and (kept.get("version"), kept.get("files")) == (VERSION, keys):
            return str(kept.get("weights"))
    return None


def _remember(folder: Path, keys: list[_FileKey], digest: str) -> None:
    if any(time.time_ns() - int(key[3]) < SETTLED_NS for key in keys):
        return
    content = json.dumps({"version": VERSION, "files": keys, "weights": digest})
    for path in _cache_files(folder):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}-{os.getpid()}")
            fresh.write_text(content)
            fresh.replace(path)  # at once: other processes may be here, too
        except OSError:  # read-only, or full
            continue
        return
