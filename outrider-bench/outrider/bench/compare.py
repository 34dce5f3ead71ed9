"""`outrider compare`: every method of drafting on the same prompts, beside plain decoding, before one target that all
share. The gateway's engine runs here, so that every round is at hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from outrider.bench.compare_runs import (
    PLAIN,
    CompareRequest,
    Method,
    Options,
    Way,
    WayRun,
    measure,
    read_requests,
    services_of,
    serving,
)
from outrider.bench.figures import draw_compare, write_figure
from outrider.bench.harness import report_failures
from outrider.bench.results import (
    ForeignLoad,
    Json,
    align,
    bracketed,
    column_sums,
    dump,
    median_of,
    new_result,
    note,
    other_programs,
    shares,
    spread,
)
from outrider.cli.arguments import parse, split_ids
from outrider.cli.local_services import leave_on_signals
from outrider.cli.serve import ServeSettings
from outrider.llm.config import MTP
from outrider.pairs import pair_path
from outrider.proposers.registry import CHOICES, HEADS, METHODS, check_method, list_problem, method_of
from outrider.rpc.hub import locate
from outrider.rpc.settings import ServiceSettings, Threads
from outrider.target_service.settings import EngineSettings

ALL = "all"
CompareMode = Literal["sequential", "chains", "branches", "auto"]
DESCRIPTION = (
    "Decode the prompts of files (bare arguments after the target) plainly and with every method of drafting, in "
    "turns, and print for each method tokens a round, the draft's time a round, acceptance by position, and the speed "
    "over plain decoding. Prompts: a line each, or JSON lines with prompt (a text, or token ids) and, if wanted, "
    "prediction, max_tokens, temperature, and counts: false for what is asked before and not measured."
)


class CompareSettings(ServiceSettings, EngineSettings, Options):
    """What is compared, on what."""

    section: ClassVar[str] = "compare"

    target: Path = Field(description="folder or hub id of the target's checkpoint, or an embedded pair's name: python")
    files: list[Path] = Field(min_length=1, description="files of prompts; also the bare arguments after the target")
    methods: Annotated[tuple[str, ...], BeforeValidator(split_ids)] = Field(
        (ALL,),
        min_length=1,
        description=f"all, or some of {CHOICES}, or lists of them, as suffix+draft_model; "
        f"heads beside the target: {', '.join(HEADS)}",
    )
    draft: list[str] = Field(
        default_factory=list,
        description="model or head to draft with, as DIR for draft_model or METHOD=DIR (default: the embedded pair's)",
    )
    modes: Annotated[tuple[CompareMode, ...], BeforeValidator(split_ids)] = Field(
        ("sequential", "auto"), min_length=1, description="how far drafts run ahead; auto: as a gateway chooses"
    )
    repeats: int = Field(3, ge=1, le=100, description="how often all is measured")
    whole: bool = Field(False, description="each file is one prompt")
    threads: Threads = None
    output: Path | None = Field(None, description="file to write the result to, as JSON")
    plot: Path | None = Field(None, description="file to draw the result to, as SVG (with matplotlib)")
    start_timeout: float = Field(600.0, gt=0, description="seconds that a service may take to start")

    @field_validator("methods")
    @classmethod
    def _check_methods(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            parts = () if name == ALL else Method(name).parts
            for part in parts:
                _check(part)
            if parts and (problem := list_problem(parts)):
                raise ValueError(problem)
        return names

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.engine == "vllm" and (self.in_process or self.expand):
            raise ValueError("in_process and expand (--in-process, --expand) are for engine outrider; leave them out")
        return self

    @model_validator(mode="after")
    def _check_drafts(self) -> Self:
        for name in self.drafts:
            if not method_of(_check(name)).needs_model:
                raise ValueError(f"draft: {name} drafts without a model")
        return self

    @property
    def drafts(self) -> dict[str, str]:
        """By method the folder of its model."""
        split = [text.rpartition("=") for text in self.draft]
        return {method or "draft_model": folder for method, _, folder in split}

    @property
    def pair(self) -> str:
        """The embedded pair that the target names; empty: it is a folder or a hub id."""
        try:
            pair_path(str(self.target))
        except ValueError:
            return ""
        return "" if self.target.is_dir() else str(self.target)

    @property
    def chosen(self) -> list[Method]:
        """The methods, each once; of `all` those that have what they draft from."""
        models = {*self.drafts, *(name for name, row in METHODS.items() if self.pair or not row.needs_model)}
        models.update(pair_path(self.pair).heads if self.pair else ())
        every = [name for name in (*METHODS, *HEADS) if name in models]
        names = [each for name in self.methods for each in (every if name == ALL else [name])]
        return [Method(name) for name in dict.fromkeys(names)]

    def served(self) -> list[tuple[Method, ServeSettings]]:
        """The services of every method. Raises ValueError where one lacks its model."""
        model = {} if self.pair else {"model": locate(self.target)}
        target = {**model, **self.of_engine(), "threads": self.threads}
        common = {"start_timeout": self.start_timeout} | ({"pair": self.pair} if self.pair else {})
        return [(method, services_of(common, target, method, self._draft_of(method))) for method in self.chosen]

    def _draft_of(self, method: Method) -> str:
        named = [self.drafts[part] for part in method.parts if part in self.drafts]
        if method.is_head and not named and self.pair:
            return str(pair_path(self.pair).head_by(method.name))
        if method.name == MTP and not named:
            return ""  # the target's own
        if not named and not self.pair and any(method_of(part).needs_model for part in method.parts):
            raise ValueError(f"{method.name} drafts with a model: give --draft, as DIR or METHOD=DIR")
        return str(locate(Path(named[0]), drafts_by=method.name)) if named else ""


def _check(name: str) -> str:
    return name if name in HEADS else check_method(name, allow_code=False)


def main(argv: Sequence[str] | None = None, prog: str = "outrider compare") -> int:
    """Measures, prints and draws; 1 if a file cannot be read, or a service does not start."""
    settings = parse(CompareSettings, argv, prog, DESCRIPTION, bare=("target", "files"))
    leave_on_signals()
    return report_failures(prog, lambda: finish(settings, asyncio.run(run(settings))))


async def run(settings: CompareSettings) -> Json:
    """All files, as often as is wanted."""
    files = [read_requests(path, settings.whole) for path in settings.files]
    served = settings.served()
    note("starting the services ...")
    repeats: list[list[dict[Way, WayRun]]] = []
    async with serving(served, settings) as engines:
        load = ForeignLoad()
        async for found in measure(engines, files, settings.modes, settings, settings.repeats):
            repeats.append(found)
            note(f"  {len(repeats)} of {settings.repeats}")
        others = load.cpus()
    result = new_result(_setup(settings, served)) | {"other_programs": others}
    result["sets"] = [
        describe_set(path, requests, [repeat[place] for repeat in repeats])
        for place, (path, requests) in enumerate(zip(settings.files, files, strict=True))
    ]
    return result


def finish(settings: CompareSettings, result: Json) -> None:
    """Prints the tables, and writes what is wanted."""
    notes = f"medians of {settings.repeats}, least and greatest; {other_programs(result['other_programs'])}"
    print("\n".join([*tables(result), notes, *differences(result)]))
    if settings.output is not None:
        settings.output.write_text(dump(result), encoding="utf-8")
    if settings.plot is not None:
        write_figure(settings.plot, lambda: draw_compare(result))


def _setup(settings: CompareSettings, served: Sequence[tuple[Method, ServeSettings]]) -> Json:
    return {
        "target": settings.target.name, "methods": [method.name for method, _ in served], "local": settings.local,
        "in_process": settings.in_process, "expand": settings.expand,
        "modes": list(settings.modes), "k": settings.num_draft_tokens, "max_tokens": settings.max_tokens,
        "temperature": settings.temperature, "repeats": settings.repeats, "threads": settings.threads,
        "seed": settings.seed,
    }  # fmt: skip


def describe_set(path: Path, requests: Sequence[CompareRequest], repeats: Sequence[Mapping[Way, WayRun]]) -> Json:
    """One file: of every way the medians over the repeats, and its speed over plain decoding's, repeat by repeat."""
    plain = Way()
    counted = sum(request.counts for request in requests)
    ways = {}
    for way in repeats[0]:
        runs = [repeat[way] for repeat in repeats]
        speeds = [run.num_tokens / run.seconds for run in runs]
        plain_speeds = [repeat[plain].num_tokens / repeat[plain].seconds for repeat in repeats]
        ways[way.name] = {
            "method": PLAIN if way.method is None else way.method.name,
            "mode": way.mode,
            "tokens_per_round": spread([run.tokens_per_round for run in runs]),
            "draft_ms": spread([run.draft_ms for run in runs]),
            "tokens_per_s": spread(speeds),
            "over_plain": spread([own / other for own, other in zip(speeds, plain_speeds, strict=True)]),
            "off": spread([run.share_off for run in runs]),
            "accepted": column_sums([run.tally.num_accepted_per_position for run in runs]),
            "tested": column_sums([run.tally.num_tested_per_position for run in runs]),
            "forced": sum(run.tally.num_forced_tokens for run in runs),
            "forced_accepted": sum(run.tally.num_accepted_forced_tokens for run in runs),
            "different": sum(run.num_different for run in runs),
        }
    return {"name": path.stem, "prompts": counted, "ways": ways}


def tables(result: Json) -> Iterator[str]:
    """A table a file: a row a method. What a round brought is of the first mode, where the number of drafted tokens is
    fixed unless that is auto; speeds are of every mode. Forced tokens are there where a prompt has a schema."""
    modes = result["setup"]["modes"]
    for found in result["sets"]:
        ways: Json = found["ways"]
        forces = any(way["forced"] for way in ways.values())
        head = [
            "method", "tokens/round", "draft ms/round", *(f"{mode} / plain" for mode in modes),
            *["auto off"] * ("auto" in modes), *["forced"] * forces, "accepted at 1, 2, ...",
        ]  # fmt: skip
        plain = [PLAIN, "1.00", "", f"{median_of(ways[PLAIN]['tokens_per_s'], 1)} tokens/s"]
        rows = [head, plain + [""] * (len(head) - len(plain))]
        for method in dict.fromkeys(way["method"] for way in ways.values() if way["method"] != PLAIN):
            by_mode = [ways[f"{method}, {mode}"] for mode in modes]
            first, automatic = by_mode[0], [way for way in by_mode if way["mode"] == "auto"]
            rows.append(
                [
                    method,
                    median_of(first["tokens_per_round"], 2),
                    median_of(first["draft_ms"], 2),
                    *(bracketed(way["over_plain"]) for way in by_mode),
                    *(f"{way['off']['median']:.0%}" for way in automatic),
                    *([f"{first['forced_accepted']}/{first['forced']}"] if forces else []),
                    " ".join(f"{share:.2f}" for share in shares(first)),
                ]
            )
        width = max(len(row[-1]) for row in rows)  # the shares begin below one another
        rows = [[*row[:-1], row[-1].ljust(width)] for row in rows]
        yield from ["", f"{found['name']}: {found['prompts']} prompts", *align(rows)]


def differences(result: Json) -> Iterator[str]:
    """Answers that are not plain decoding's: a line a way that had any."""
    for found in result["sets"]:
        for name, way in found["ways"].items():
            if way["different"]:
                yield (
                    f"{found['name']}, {name}: {way['different']} answers are not plain decoding's: near-ties, which "
                    "the number of rows in a step decides (OUTRIDER_TARGET__BATCH_INVARIANT=true rules them out)"
                )
