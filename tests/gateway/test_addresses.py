"""What the addresses of a command line stand for, with a resolver of the test's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from outrider.gateway.peers.addresses import Addresses, look_up
from outrider.rpc.errors import InvalidArgument


class Resolver:
    """Names and what they stand for; another name has no address."""

    def __init__(self, **hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if host not in self.hosts:
            raise OSError(f"no address for {host}")
        return self.hosts[host]


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (["127.0.0.1:5", ":6", "localhost:7"], ("127.0.0.1:5", ":6", "localhost:7")),
        (["10.0.0.1:5, 10.0.0.2:5", "10.0.0.1:5"], ("10.0.0.1:5", "10.0.0.2:5")),
        (["ipv4:10.0.0.1:5,10.0.0.2:6"], ("10.0.0.1:5", "10.0.0.2:6")),
        (["ipv6:[::1]:5,[fe80::2]:6", "unix:/run/x"], ("[::1]:5", "[fe80::2]:6", "unix:/run/x")),
        (["dns:///10.0.0.9:5"], ("10.0.0.9:5",)),
    ],
)
def test_addresses_stand_for_themselves(given: list[str], known: tuple[str, ...]) -> None:
    addresses = Addresses(given)
    assert addresses.complete and not addresses.names and addresses.known == known


@pytest.mark.parametrize("name", ["dns:///targets:50051", "dns:targets:50051", "targets:50051"])
async def test_every_address_of_a_name_is_one(name: str) -> None:
    resolver = Resolver(targets=["10.0.0.1", "fd00::2"])
    addresses = Addresses([f"10.0.0.7:5,{name}"], resolver)
    assert not addresses.complete and addresses.known == ("10.0.0.7:5",)
    await addresses.refresh(name)
    assert addresses.complete
    assert addresses.known == ("10.0.0.7:5", "10.0.0.1:50051", "[fd00::2]:50051")
    resolver.hosts["targets"] = ["10.0.0.3"]
    await addresses.refresh(name)
    assert addresses.known == ("10.0.0.7:5", "10.0.0.3:50051") and resolver.asked == [("targets", 50051)] * 2


async def test_a_name_without_an_answer_stands_for_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver(targets=["10.0.0.1"])
    addresses = Addresses(["dns:///targets:5", "dns:///drafts:6"], resolver)
    with caplog.at_level(logging.WARNING, "outrider.gateway"):
        for _ in range(3):
            for name in addresses.names:
                await addresses.refresh(name)
            assert addresses.known == ("10.0.0.1:5",) and addresses.complete
    assert [record.getMessage().split()[0] for record in caplog.records] == ["dns:///drafts:6"]  # said once
    del resolver.hosts["targets"]
    resolver.hosts["drafts"] = ["10.0.0.2"]
    for name in addresses.names:
        await addresses.refresh(name)
    assert addresses.known == ("10.0.0.1:5", "10.0.0.2:6")


@pytest.mark.parametrize(
    "given",
    [
        "targets",
        "dns:///targets",
        "dns:///targets:0",
        "dns://8.8.8.8/targets:5",
        "dns:///:5",
        "ipv4:targets:5",
        "a:1,,b:2",
    ],
)
def test_anything_else_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgument, match="allowed: "):
        Addresses([given])


async def test_this_machines_resolver_knows_localhost() -> None:
    assert list(await look_up("localhost", 5)) == ["127.0.0.1"]
