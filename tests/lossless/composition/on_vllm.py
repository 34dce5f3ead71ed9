"""The array on vLLM: what serves rows is an `LLM` whose target vLLM runs, and what its table leaves out is what vLLM
does not do under speculation, or what our own engine has beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from lossless.composition.checkpoints import Checkpoints
from lossless.composition.serving import NAME, Server
from lossless.composition.table import EXCLUSIONS as OURS
from lossless.composition.table import FACTORS as ALL
from lossless.composition.table import Exclusion, Row, covering

from outrider.proposers.registry import HEADS

OWN = {  # one value each, of what vLLM has its own ways of
    "model": "dense", "weights": "16 bits", "kernels": "PyTorch", "blocks": "enough", "prompt": "at once",
}  # fmt: skip
# Values that are left out, and why.
LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "method": dict.fromkeys(
        (*HEADS, "p-eagle", "dflash2"), "vLLM drafts by its own heads, without this project's scheduler"
    )
    | {"draft tree": "vLLM verifies chains", "head tree": "vLLM verifies chains"}
    | {"self:int4": "the draft is our own engine's, and covered there"},
    "rule": {"coupled": "vLLM draws by noise of its own", "block": "vLLM judges token by token"},
    "constraint": {"reasoning": "reasoning before a grammar is refused by name: vLLM would bound it by neither"},
    "processors": {"bias": "refused by name", "min_p": "refused by name: vLLM leaves it out under speculation"},
}
FACTORS = {
    name: tuple(value for value in ((OWN[name],) if name in OWN else values) if value not in LEFT_OUT.get(name, {}))
    for name, values in ALL.items()
}
EXCLUSIONS = (
    *(one for one in OURS if "method" not in one.factors and "blocks" not in one.factors),
    Exclusion(
        ("constraint", "processors"),
        lambda row: row["constraint"] != "none" and row["processors"] in ("bad words", "min_tokens"),
        "bad words and min_tokens under a constraint",
        "refused by name: vLLM would end a request whose grammar allows nothing else",
    ),
)


@dataclass(frozen=True, slots=True)
class VllmRow(Row):
    """One that a target on vLLM serves, whose blocks hold 128 tokens on a CPU."""

    @property
    def num_words(self) -> range:
        """So many that a prompt has a block where each is a token."""
        return range(128, 136)


def vllm_rows(strength: int, seed: int = 0) -> tuple[VllmRow, ...]:
    """Those of a covering array."""
    return tuple(VllmRow(**values) for values in covering(FACTORS, EXCLUSIONS, strength, seed))


class VllmServer(Server):
    """Its windows are judged in vLLM's own process, where nothing tells of them."""

    judges_again: ClassVar[bool] = False
    couples: ClassVar[bool] = False

    def _held(self) -> Iterator[str]:
        draft = getattr(self.backend.draft, "service", None)
        if self.backend.engine.admission.num_active:
            yield f"{self.backend.engine.admission.num_active} requests are admitted"
        if self.backend.target._links:
            yield f"the target holds {len(self.backend.target._links)} links"
        if draft is not None and draft._links:
            yield f"the draft holds {len(draft._links)} sequences"


@contextmanager
def serving_on_vllm(checkpoints: Checkpoints, server: Sequence[str]) -> Iterator[Server]:
    """Starts what `Row.server` says. Float32, so that plain decoding has few near-ties."""
    from outrider.llm import LLM

    model, method, *_ = server
    folders = checkpoints.of(model)
    with LLM(
        folders.target,
        engine="vllm",
        dtype="float32",
        speculative_config=folders.speculative_config(method),  # type: ignore[arg-type]
        served_model_name=NAME,
        enable_lora=True,
        max_loras=2,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=480,
        threads=1,
        max_num_seqs=16,
    ) as llm:
        made = VllmServer(llm, [])
        llm._runtime.run(made.backend.target.load_adapter("one", folders.adapter))
        yield made
