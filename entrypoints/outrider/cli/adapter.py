"""`outrider admin adapter`: has running targets load or unload a low-rank adapter, or says which they have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Literal

import grpc.aio
from pydantic import Field, field_validator, model_validator

from outrider.cli.access import ServicesAccessSettings, check_addresses
from outrider.cli.arguments import fail, parse
from outrider.gateway.peers.addresses import Addresses
from outrider.gateway.peers.remote import TARGET_SERVICE, load_adapter, unload_adapter
from outrider.rpc.errors import OutriderError, Unavailable
from outrider.rpc.messages import Adapter
from outrider.rpc.security import ClientTls, open_channel
from outrider.rpc.status import from_rpc_error

DESCRIPTION = (
    "Load a low-rank adapter while targets serve (load NAME=DIR, a folder of theirs in PEFT's layout), unload it "
    "(unload NAME), or list those that there are (list). The targets are ones that were started with "
    "--allow-adapter-changes; listing needs no leave. Gateways hear of a change on their streams. Addresses are as for "
    "outrider gateway. Status 1: a target did not do it."
)
TARGET = "127.0.0.1:50051"
SHOWN_DIGEST = 12


class AdapterSettings(ServicesAccessSettings):
    """What is done with which adapter, and at which targets."""

    section: ClassVar[str] = "adapter"

    action: Literal["load", "unload", "list"] = Field(description="what to do; also the first bare argument")
    adapter: str = Field(
        "", description="NAME=DIR for load, NAME for unload; also the second bare argument", max_length=4096
    )
    target: list[str] = Field(
        default_factory=lambda: [TARGET], description=f"address of a target service, or several (default: {TARGET})"
    )
    timeout: float = Field(600.0, gt=0, description="seconds until a target is given up; it may go on with a load")

    _check_addresses = field_validator("target")(check_addresses)

    @model_validator(mode="after")
    def _check_adapter(self) -> AdapterSettings:
        wanted = {"load": "NAME=DIR", "unload": "NAME", "list": ""}[self.action]
        fits = {"load": all(self.named), "unload": bool(self.adapter) and "=" not in self.adapter}
        if not fits.get(self.action, not self.adapter):
            said = f"is {self.adapter!r:.100}" if self.adapter else "is missing"
            raise ValueError(f"adapter: {said}; allowed beside {self.action}: {wanted or 'nothing'}")
        return self

    @property
    def named(self) -> tuple[str, str]:
        """The adapter's name, and its folder for one that is loaded."""
        name, _, folder = self.adapter.partition("=")
        return name, folder


def main(argv: Sequence[str] | None = None, prog: str = "outrider admin adapter") -> int:
    """Prints what each target did or has; 1 if one did not do it."""
    settings = parse(AdapterSettings, argv, prog, DESCRIPTION, bare=("action", "adapter"))
    try:
        return asyncio.run(_run(settings, prog))
    except (OutriderError, OSError) as error:
        return fail(prog, error)


async def _run(settings: AdapterSettings, prog: str) -> int:
    """One target after another: what the first refuses is not asked of all at once."""
    addresses, tls, status = Addresses(settings.target), settings.target_tls(), 0
    for name in addresses.names:
        await addresses.refresh(name)
        if name in addresses.problems:
            status = fail(prog, Unavailable(f"{name}: {addresses.problems[name]}"))
    for address in addresses.known:
        try:
            async with asyncio.timeout(settings.timeout):
                for line in await _done(settings, address, tls):
                    print(f"{address}  {line}", flush=True)
        except TimeoutError:
            status = fail(prog, Unavailable(f"target {address}: no answer within {settings.timeout:g} s"))
        except (OutriderError, grpc.aio.AioRpcError) as error:
            known = error if isinstance(error, OutriderError) else from_rpc_error(error)
            status = fail(prog, type(known)(f"target {address}: {known.message}"))
    return status


async def _done(settings: AdapterSettings, address: str, tls: ClientTls | None) -> list[str]:
    """What a target says to what is asked of it, in words."""
    name, folder = settings.named
    async with open_channel(address, tls) as channel:
        match settings.action:
            case "load":
                return [f"loaded {_shown(await load_adapter(channel, name, folder))}"]
            case "unload":
                number = await unload_adapter(channel, name)
                left = f"{number} open sequence{'' if number == 1 else 's'} go{'es' * (number == 1)} on with it"
                return [f"unloaded {name}; {left if number else 'nothing goes on with it'}"]
            case "list":
                return [_shown(adapter) for adapter in (await TARGET_SERVICE.get_info(channel)).adapters] or ["none"]


def _shown(adapter: Adapter) -> str:
    return f"{adapter.name}, rank {adapter.rank}, {adapter.digest[:SHOWN_DIGEST]}"
