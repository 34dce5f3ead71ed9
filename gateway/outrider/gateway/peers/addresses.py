"""The addresses behind the flags: every address of a name is a replica of its own, and a name is asked again and again.
gRPC would hide them behind one channel."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from outrider.rpc.channel import dial_target
from outrider.rpc.errors import InvalidArgument, Violation

log = logging.getLogger(__name__)

RESOLVE_S = 2.0  # between two look-ups of a name: what is new or gone is known within 5 s, with a slow answer, too
_SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:")
ALLOWED = "host:port, :port, unix:path, dns:///name:port or ipv4:a:port,b:port, with ports of 1 to 65535"
_V4, _V6 = socket.AF_INET, socket.AF_INET6

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host's name and a port to its addresses, without ports. OSError where it has none."""


async def look_up(host: str, port: int) -> Sequence[str]:
    """Asks the system. Of a host with addresses of both families those of IPv4 alone: the others are the same
    replicas."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = {family: [str(entry[4][0]) for entry in found if entry[0] == family] for family in (_V4, _V6)}
    return sorted(set(hosts[_V4] or hosts[_V6]))


class Addresses:
    """What is given, as "host:port", ":port", "unix:path", "dns:///name:port", "ipv4:a:port,b:port", or a list of these
    with commas, and what it stands for now. InvalidArgument for anything else."""

    def __init__(self, given: Sequence[str], lookup: Lookup = look_up) -> None:
        self._parts = [part.strip() for text in given for part in text.split(",")]
        self._lookup = lookup
        for part in self._parts:
            _check(part)
        self._known: dict[str, tuple[str, ...]] = {  # of names: the last answer
            part: (_bare(part),) for part in self._parts if not _is_name(part)
        }
        self._problems: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What has to be looked up, each once."""
        return tuple(dict.fromkeys(filter(_is_name, self._parts)))

    @property
    def complete(self) -> bool:
        """Whether every name has been looked up, with an answer or without."""
        return all(name in self._known or name in self._problems for name in self.names)

    @property
    def known(self) -> tuple[str, ...]:
        """Every address, by the last look-up; in the order given, each once."""
        return tuple(dict.fromkeys(address for part in self._parts for address in self._known.get(part, ())))

    @property
    def problems(self) -> Mapping[str, str]:
        """Why names had no answer when they were last looked up."""
        return self._problems

    async def refresh(self, name: str) -> None:
        """Asks for a name. One without an answer stands for what it stood for before."""
        host, _, port = _bare(name).rpartition(":")
        try:
            hosts = await self._lookup(host, int(port))
        except (OSError, UnicodeError) as error:  # the latter for what no host can be called
            if self._problems.get(name) != str(error):
                log.warning("%s cannot be looked up: %s; trying again", name, error)
            self._problems[name] = str(error)
            return
        self._problems.pop(name, None)
        self._known[name] = tuple(f"[{found}]:{port}" if ":" in found else f"{found}:{port}" for found in hosts)


def _check(part: str) -> None:
    host = _bare(part).rpartition(":")[0]
    if part.startswith(("ipv4:", "ipv6:")):
        fits = _is_ip(host)
    else:
        fits = not _is_name(part) or (host not in ("", "unix") and "/" not in host)
    try:
        dial_target(_bare(part))
    except InvalidArgument:
        fits = False
    if not fits:
        problem = f"is {part[:100]!r}; allowed: {ALLOWED}"
        raise InvalidArgument.of([Violation("address", problem)])


def _bare(part: str) -> str:
    return next((part.removeprefix(scheme) for scheme in _SCHEMES if part.startswith(scheme)), part)


def _is_name(part: str) -> bool:
    """Whether it has to be looked up. "localhost" without dns: is this machine, by whichever family it listens on."""
    host = _bare(part).rpartition(":")[0]
    if _is_ip(host):
        return False
    return part.startswith("dns:") or not (part.startswith("unix:") or host in ("", "localhost"))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
