"""`outrider model convert`: a checkpoint whose weights are .bin files (pickles) becomes one of safetensors; with
--quantize any checkpoint becomes one of few bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from outrider.cli.arguments import fail, parse
from outrider.rpc.settings import ServiceSettings

DESCRIPTION = (
    "Copy the checkpoint SOURCE to the new folder DESTINATION with its .bin weights as safetensors. A .bin file is a "
    "pickle: it is read with weights only, in a process of its own. With --quantize: any checkpoint, or a GGUF file, "
    "with its products rounded to few bits, as compressed-tensors has them."
)
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
INT4_GROUP = 32
SAFETENSORS_INDEX = "model.safetensors.index.json"
# What belongs to a checkpoint beside its weights; an index of other files, or an adapter's configuration, does not.
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*")


class ConvertSettings(ServiceSettings):
    """Which folder is converted, and to where."""

    section: ClassVar[str] = "convert"

    source: Path = Field(description="folder of the checkpoint with .bin weights; also the first bare argument")
    destination: Path = Field(description="folder to make; also the second bare argument")
    quantize: Literal["int8", "int4"] | None = Field(None, description="round each product's numbers to so many bits")
    group: int | None = Field(
        None, ge=16, description="inputs that share a scale (default: 32 for int4, all of an output's for int8)"
    )
    text: Path | None = Field(None, description="text on which the change of loss is measured, with --quantize")

    @model_validator(mode="after")
    def _rounds(self) -> Self:
        given = [name for name in ("group", "text") if getattr(self, name) is not None]
        if given and self.quantize is None:
            raise ValueError(f"{given[0]} is for --quantize int8 or int4")
        return self


def main(argv: Sequence[str] | None = None, prog: str = "outrider model convert") -> int:
    """Converts a folder; 1 if it cannot be."""
    settings = parse(ConvertSettings, argv, prog, DESCRIPTION, bare=("source", "destination"))
    try:
        if settings.quantize is not None:
            _quantize(settings, settings.quantize)
            return 0
        files = convert(settings.source, settings.destination)
    except (OSError, ValueError) as error:
        return fail(prog, error)
    print(f"{settings.destination}: {', '.join(files)}")
    return 0


def _quantize(settings: ConvertSettings, rounding: Literal["int8", "int4"]) -> None:
    from outrider.cli.quantize import change_of_loss, quantize  # torch comes with it: only where needed

    group = INT4_GROUP if settings.group is None and rounding == "int4" else settings.group
    for line in quantize(settings.source, settings.destination, rounding, group):
        print(line)
    print(settings.destination)
    if settings.text is not None:
        found = change_of_loss(settings.source, settings.destination, settings.text)
        before, after = found.target_loss, sum(found.draft_losses) / len(found.draft_losses)
        same = sum(found.matches) / len(found.matches)
        print(f"loss: {before:.4f} before, {after:.4f} now ({after / before - 1:+.2%}); the same choice at {same:.1%}")


def convert(source: Path, destination: Path) -> list[str]:
    """Writes `destination`, complete or not at all; returns its weight files' names."""
    if destination.exists():
        raise ValueError(f"{destination} exists; nothing is overwritten")
    files = pickles(source)
    partial = destination.with_name(destination.name + ".partial")
    if partial.exists():
        raise ValueError(f"{partial} exists: the rest of a conversion that was cut short; remove it first")
    partial.mkdir(parents=True)
    try:
        for pattern in COPIED:
            for path in sorted(source.glob(pattern)):
                if not path.name.endswith(".index.json") and path.name != "adapter_config.json":
                    shutil.copyfile(path, partial / path.name)
        names = _convert_weights(files, partial)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return names


def pickles(source: Path) -> list[Path]:
    """The .bin weights, as transformers would choose them: the one file, else those of the index. ValueError where it
    would read safetensors."""
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} is no checkpoint: it holds no config.json")
    if any(source.glob("*.safetensors")):
        _refuse_loadable(source)
    index = source / PICKLE_INDEX
    if index.is_file() and not (source / PICKLE).is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = [PICKLE]
    absent = [name for name in names if Path(name).name != name or not (source / name).is_file()]
    if absent:
        raise ValueError(f"{source} lacks {', '.join(absent)}")
    return [source / name for name in names]


def _refuse_loadable(source: Path) -> None:
    """Raises ValueError where the loader, by its own rule, finds weights, or a name of weights that are not there."""
    from outrider.engine import checkpoint  # torch comes with it: only where needed
    from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint

    try:
        entry = checkpoint.weights_entry(source)
    except WrongCheckpoint:
        raise
    except UnsupportedModel:  # no safetensors that would be loaded
        return
    raise ValueError(f"{source} holds {entry}, from which it is loaded: nothing to convert")


def _convert_weights(files: Sequence[Path], folder: Path) -> list[str]:
    """Each pickle in a process of its own: what a hostile one could do ends there, and so does its memory."""
    weight_map: dict[str, str] = {}
    names: list[str] = []
    total = 0
    for number, path in enumerate(files, start=1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors, size = _convert_file(path, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
        total += size
        names.append(name)
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return names


def _convert_file(source: Path, destination: Path) -> tuple[list[str], int]:
    """Converts one file; returns its tensors' names and their bytes."""
    command = [sys.executable, "-m", "outrider.cli.convert_file", str(source), str(destination)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ValueError(f"cannot convert {source}: {lines[-1]}")
    report = json.loads(done.stdout)
    return report["tensors"], report["bytes"]
