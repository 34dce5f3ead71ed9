"""The models behind one address: which of them a request is for, by the name that it says, and who may ask it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.gateway.auth import CALLER
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.prepare import no_such_model
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, PermissionDenied, Violation


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
