"""`outrider learn`: makes low-rank weights for a draft of the texts that it drafts for, while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from outrider.cli.access import ServicesAccessSettings, check_addresses
from outrider.cli.arguments import fail, one_line, parse, require_config
from outrider.rpc.errors import OutriderError
from outrider.rpc.hub import locate
from outrider.rpc.logs import setup_logging
from outrider.rpc.security import ClientTls

if TYPE_CHECKING:
    from outrider.learning.learner import Learner
    from outrider.learning.links import LearningLink

DESCRIPTION = (
    "Let a draft learn from what it drafts for, or a head beside its target. The service is one that was started with "
    "--learn-from, whose folders of weights this process reads, too. Texts that targets answer train low-rank weights; "
    "what is judged better, by texts held out, drafts from then on, and is taken back if it falls behind. Several "
    "services of the same weights share what is learned. The tokens that clients get do not change."
)
DRAFT, TARGET = "127.0.0.1:50052", "127.0.0.1:50051"
AUTOGROUP = Path("/proc/self/autogroup")


class LearnSettings(ServicesAccessSettings):
    """From whom is learned, and how."""

    section: ClassVar[str] = "learn"

    model: Path = Field(
        description="folder of the draft's checkpoint, or its hub id; the one that the drafts serve. With --head, of "
        "the target's"
    )
    head: Path | None = Field(
        None,
        description="folder of the head that learns in a draft's place, which the targets serve beside --model: eagle3 "
        "or mtp, of one layer",
    )
    folder: Path = Field(description="folder of the versions, which the services read, too")
    draft: list[str] = Field(
        default_factory=list, description=f"address of a draft service, or several (default: {DRAFT})"
    )
    target: list[str] = Field(
        default_factory=list, description=f"with --head: address of a target service, or several (default: {TARGET})"
    )
    rank: int = Field(16, ge=1, le=64, description="of the weights; at most the services' --learned-rank")
    learning_rate: float = Field(2e-3, gt=0, le=1, description="of the optimizer")
    batch: int = Field(8, ge=1, le=256, description="texts of a step")
    greedy_weight: float = Field(1.0, ge=0, le=100, description="of a greedy token's likelihood, beside a drawn one's")
    replay_weight: float = Field(
        0.3, ge=0, le=100, description="of the divergence from the draft as it was, on texts that it writes itself"
    )
    hold_out: int = Field(3, ge=2, le=1000, description="one text in so many judges, and teaches nothing")
    error: float = Field(
        0.01, gt=0, lt=1, description="share of judgements that may promote what is no better, at most"
    )
    num_draft_tokens: int = Field(
        5,
        ge=1,
        le=128,
        description="drafted tokens of a round, as judgements count, and a pass, where it drafts in parallel",
    )
    memory_mb: int = Field(64, ge=1, description="memory of the texts of a target and salt, in MiB")
    keys: int = Field(
        8,
        ge=1,
        le=1024,
        description="targets and salts for which something is in use, the latest, and as many for which nothing is "
        "yet; at most the services' --learned-drafts",
    )
    max_tokens: int = Field(2048, ge=16, le=8192, description="longest text that teaches, prompt and answer")
    threads: int = Field(1, ge=1, le=256, description="threads of its passes")
    niceness: int = Field(19, ge=0, le=19, description="by how much others go first on its cores; 0: they do not")
    seconds: float = Field(0.0, ge=0, description="after which it ends; 0: never")
    metrics: str = Field("", description="address of its metrics: HOST:PORT or :PORT")

    _check_addresses = field_validator("draft", "target")(check_addresses)

    @model_validator(mode="after")
    def _check_services(self) -> Self:
        if self.head is None and self.target:
            raise ValueError("target (--target) is for a head; give --head DIR, too, or --draft")
        if self.head is not None and self.draft:
            raise ValueError("draft (--draft) is for a draft's model; with --head give --target")
        return self

    @property
    def role(self) -> str:
        """Of the services."""
        return "draft" if self.head is None else "target"

    @property
    def services(self) -> list[str]:
        """Where they are."""
        return self.draft or [DRAFT] if self.head is None else self.target or [TARGET]

    def tls(self) -> ClientTls | None:
        """How they are reached over TLS, if they are."""
        return self.draft_tls() if self.head is None else self.target_tls()


def main(argv: Sequence[str] | None = None, prog: str = "outrider learn") -> int:
    """Learns until SIGTERM or SIGINT; 1 where it cannot."""
    settings = parse(LearnSettings, argv, prog, DESCRIPTION)
    setup_logging("text", "outrider-learn")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
    go_last(settings.niceness)
    try:
        model = locate(settings.model)
        require_config(model, "--model")
        head = None if settings.head is None else locate(settings.head)
        from outrider.learning.versions import owned

        with owned(settings.folder):
            learner = make_learner(settings, model, head)
            asyncio.run(serve(settings, learner))
    except (OutriderError, OSError, ValueError) as error:
        return fail(prog, error, one_line(error))
    return 0


def go_last(niceness: int) -> None:
    """Lets others go first on the cores. On Linux niceness may count within a session alone, and that of sessions
    between them (sched(7), autogroup): where this process leads one, it has the same."""
    os.nice(niceness)
    if niceness and os.getsid(0) == os.getpid() and AUTOGROUP.is_file():
        with suppress(OSError):
            AUTOGROUP.write_text(str(niceness), "utf-8")


@asynccontextmanager
async def exported_metrics(listen: str, learner: Learner, links: Sequence[LearningLink]) -> AsyncIterator[None]:
    """While in it, the series are served where `listen` says; ready while a service is there."""
    from outrider.learning.metrics import LearnerMetrics
    from outrider.rpc.metrics import exported
    from outrider.rpc.server import HealthMonitor

    health = HealthMonitor(["outrider.learn"], is_ready=lambda: any(link.is_there for link in links))
    await health.start()
    try:
        async with exported(LearnerMetrics(learner), listen, health, "learner"):
            yield
    finally:
        await health.stop()


def make_learner(settings: LearnSettings, model: Path, head: Path | None = None) -> Learner:
    """Loads the draft's model, or a head and its target's, and what was in use. Raises ValueError."""
    import torch

    from outrider.learning.learner import Learner, LearnerPlan
    from outrider.learning.student import StudentPlan
    from outrider.learning.students import student_of
    from outrider.learning.traffic import PoolPlan
    from outrider.learning.versions import Shelf

    torch.set_num_threads(settings.threads)
    pool = PoolPlan(settings.memory_mb << 20, settings.hold_out, settings.max_tokens)
    plan = LearnerPlan(pool, settings.keys, error=settings.error, window=settings.num_draft_tokens)
    how = StudentPlan(
        settings.rank, settings.learning_rate, settings.batch, settings.num_draft_tokens, settings.greedy_weight,
        settings.replay_weight,
    )  # fmt: skip
    student = student_of(model, how, head, settings.max_tokens)
    return Learner(student, Shelf(settings.folder.absolute(), student.digest), plan)


async def serve(settings: LearnSettings, learner: Learner) -> None:
    """Learns on a thread of its own, beside the drafts' streams. Raises what ends a stream for good."""
    from outrider.learning.learner import run
    from outrider.learning.links import LearningLink

    over = threading.Event()
    loop, tls = asyncio.get_running_loop(), settings.tls()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if settings.seconds:
        loop.call_later(settings.seconds, stopped.set)

    addresses, role = settings.services, settings.role
    links = [LearningLink(address, tls, learner, lambda: dict(learner.shelf.live), role) for address in addresses]
    learning = asyncio.create_task(asyncio.to_thread(run, learner, over.is_set))
    tasks = [learning, asyncio.create_task(stopped.wait()), *(asyncio.create_task(link.run()) for link in links)]
    async with AsyncExitStack() as stack:
        if settings.metrics:
            await stack.enter_async_context(exported_metrics(settings.metrics, learner, links))
        logging.getLogger(__name__).info("learns from %s", ", ".join(addresses))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.set()
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
