"""The models behind one address: which of them a request is for, by the name that it says, and who may ask it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.gateway.auth import CALLER
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.prepare import no_such_model
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, PermissionDenied, Violation
from outrider.rpc.messages import TargetInfo

log = logging.getLogger(__name__)


class Models(Protocol):
    """What is served: an engine alone, or several by name."""

    @property
    def engines(self) -> Sequence[GenerationEngine]:
        """All of them, the default first."""
        ...

    def called(self, name: str | None) -> GenerationEngine:
        """The one whose model, or adapter, a request names; None or empty: it names none."""
        ...


class ServedModels:
    """Several models, each with an engine of its own; the first is for requests that name none, if it `has_default`."""

    def __init__(self, engines: Sequence[GenerationEngine], has_default: bool) -> None:
        self.engines, self._has_default = tuple(engines), has_default

    def called(self, name: str | None) -> GenerationEngine:
        """InvalidArgument where there is no default and none is named, NotFound for a name that none has,
        FailedPrecondition for one that several have."""
        if not name:
            if not self._has_default:
                problem = f"is not given; allowed: {', '.join(map(name_of, self.engines))}"
                raise InvalidArgument.of([Violation("model", problem)])
            return self.engines[0]
        found = [one for one in self.engines if name == name_of(one)]
        found = found or [one for one in self.engines if name in adapters_of(one)]
        if not found:
            adapters = (adapter for one in self.engines for adapter in adapters_of(one))
            raise no_such_model(name, *map(name_of, self.engines), *adapters)
        if len(found) > 1:
            models = " and of ".join(map(name_of, found))
            raise FailedPrecondition(f"model: {name} is an adapter of {models}; one has to be given another name")
        return found[0]


@dataclass(slots=True, eq=False)
class UniqueNames:
    """Of models and adapters, each of which a request may name: those that are known when a target is met."""

    engines: Sequence[GenerationEngine] = ()

    def check(self, place: int, info: TargetInfo) -> None:
        """Judges what a target of one of the engines brings. FailedPrecondition where it is that engine's first, and
        something of it is called as another model or its adapter; what serves already goes on, and who asks for that
        name is refused."""
        own = self.engines[place]
        names = [own.config.model_name or info.model.name, *(adapter.name for adapter in info.adapters)]
        for engine in self.engines:
            taken = {name_of(engine), *adapters_of(engine)} if engine is not own else set()
            if clashes := [name for name in names if name in taken]:
                told = f"{clashes[0]} of the target of {names[0]} is called as {name_of(engine)} or an adapter of it"
                if own.known is None:
                    raise FailedPrecondition(f"{told}; allowed: names that stand once", reason="NAME_TAKEN")
                log.warning("%s; requests that name it are refused", told)


def name_of(engine: GenerationEngine) -> str:
    """The name of a model; empty where its target has to say it and has not yet."""
    return "" if engine.known is None and not engine.config.model_name else engine.model_name


def adapters_of(engine: GenerationEngine) -> list[str]:
    """The names of a model's adapters, as far as is known."""
    return [] if engine.known is None else [adapter.name for adapter in engine.known.adapters]


def may_ask(engine: GenerationEngine) -> bool:
    """Whether the caller of the call under way may have this model."""
    caller = CALLER.get()
    return caller is None or not caller.models or name_of(engine) in caller.models


def require_allowed(engine: GenerationEngine) -> GenerationEngine:
    """The engine. PermissionDenied where its model is not for the caller."""
    if not may_ask(engine) and (caller := CALLER.get()) is not None:
        allowed = ", ".join(caller.models)
        raise PermissionDenied(f"model: {name_of(engine)} is not for {caller.name}; allowed: {allowed}")
    return engine
