"""Who asks, by a bearer token, and what each caller may: the same before every method of gRPC and every path of HTTP.

A file of YAML has the callers by name, each with a token, or with a token and bounds:

    alice: 3c1f...
    batch:
      token: 9a7e...
      priority: 10
      salt: research
      models: [large]

It is read again when it changes. Tokens are compared as digests, all of them, in a time that says nothing of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from outrider.rpc.errors import FailedPrecondition, Unauthenticated
from outrider.rpc.interceptors import HEALTH, host_of
from outrider.rpc.messages import MAX_NAME_CHARS
from outrider.rpc.private_files import warn_if_open
from outrider.rpc.security import Watched
from outrider.rpc.words.request import GenerationRequest

# What no token is asked for: an orchestrator's probes have none.
OPEN_SERVICES = (HEALTH,)
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})

FORM = "allowed: a mapping of callers' names to tokens, as `alice: TOKEN` or `alice: {token: TOKEN, priority: 10}`"
AUTHORIZATION, SCHEME = "authorization", "bearer"
MIN_TOKEN_CHARS = 16

Token = Annotated[str, Field(pattern=r"^[\x21-\x7e]+$", min_length=MIN_TOKEN_CHARS, max_length=1024)]
# Whose request is served; None where no token is asked for.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


@dataclass(frozen=True, slots=True)
class Caller:
    """One who may ask, and how."""

    name: str
    salt: str  # what is kept of its texts is found by callers of the same salt alone
    priority: int  # the least that its requests have: lower is served first
    models: tuple[str, ...] = ()  # that it may ask, with their adapters; empty: all

    def own(self, request: GenerationRequest) -> GenerationRequest:
        """The request as this caller's. What is no priority and no salt is left for the validator to refuse."""
        request = replace(request, caller=self.name)
        if type(request.priority) is int:
            request = replace(request, priority=max(request.priority, self.priority))
        if not isinstance(request.salt, str) or len(request.salt) > MAX_NAME_CHARS:
            return request
        joined = f"{self.salt}\0{request.salt}".encode("utf-8", "surrogatepass")
        return replace(request, salt=hashlib.sha256(joined).hexdigest())


def caller_of(context: Any) -> str:
    """Whose share of the calls one takes: its credential's, else its host's."""
    caller = CALLER.get()
    return host_of(context) if caller is None else f"caller {caller.name}"


class _Entry(BaseModel):
    """A caller in the file."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    token: Token
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    salt: str | None = Field(None, min_length=1, max_length=MAX_NAME_CHARS)
    models: tuple[_Name, ...] = ()


_FILE = TypeAdapter(Annotated[dict[_Name, _Entry], Field(min_length=1)], config=ConfigDict(hide_input_in_errors=True))


class Tokens:
    """The callers of a file. FailedPrecondition at first for one that cannot be used; see Watched."""

    def __init__(self, path: Path) -> None:
        self._callers = Watched([path], lambda: _read(path))

    def caller_of(self, authorization: str) -> Caller:
        """Whose token the header's value is. Unauthenticated for none, and for a token that is nobody's."""
        scheme, _, token = authorization.strip().partition(" ")
        if scheme.lower() != SCHEME or not token.strip():
            raise Unauthenticated("no token; give one as the header authorization: Bearer TOKEN", reason="NO_TOKEN")
        shown, found = _digest(token.strip()), None
        for digest, caller in self._callers.current()[0]:
            if hmac.compare_digest(digest, shown):
                found = caller
        if found is None:
            raise Unauthenticated("the token is not known here", reason="UNKNOWN_TOKEN")
        return found

    async def check_call(self, method: str, context: Any) -> None:
        """Before a call of gRPC, whose task from now on has its caller."""
        if not method.startswith(OPEN_SERVICES):
            CALLER.set(self.caller_of(dict(context.invocation_metadata() or ()).get(AUTHORIZATION, "")))


def _read(path: Path) -> Sequence[tuple[bytes, Caller]]:
    try:
        warn_if_open(path, "the callers' tokens")
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(given, dict):
            given = {name: {"token": entry} if isinstance(entry, str) else entry for name, entry in given.items()}
        entries = _FILE.validate_python(given)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FailedPrecondition(f"{path}: cannot be read: {reason}") from error
    except yaml.YAMLError:
        raise FailedPrecondition(f"{path}: is no YAML; {FORM}") from None
    except ValidationError as error:
        raise FailedPrecondition(f"{path}: {_explain(error)}; {FORM}") from None
    callers = {
        _digest(entry.token): Caller(name, entry.salt or name, entry.priority, entry.models)
        for name, entry in entries.items()
    }
    if len(callers) < len(entries):
        raise FailedPrecondition(f"{path}: two names have the same token; allowed: a token each")
    return tuple(callers.items())


def _explain(error: ValidationError) -> str:
    """What is wrong where, without what stands there."""
    first = error.errors(include_input=False, include_url=False)[0]
    problems = {
        "dict_type": "is no mapping",
        "model_type": "is neither a token nor a mapping with one",
        "too_short": "has no callers: nobody could ask",
        "missing": "is missing",
        "extra_forbidden": "is not known; known are token, priority, salt, models",
        "string_pattern_mismatch": "has other characters than visible ones of ASCII",
        "string_too_short": f"is shorter than {first.get('ctx', {}).get('min_length')} characters",
    }
    problem = problems.get(first["type"], f"{first['msg'][:1].lower()}{first['msg'][1:]}")
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {problem}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
