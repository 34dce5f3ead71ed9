"""`outrider admin adapter`: what running targets are told, and what they say."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from support.fakes import TargetServicer, ToyTarget, serving, target_info, with_adapters

from outrider.cli.adapter import main


async def run(*arguments: str, targets: int = 1, num_left: int = 0) -> tuple[int, list[TargetServicer], list[str]]:
    """The status, the targets and their addresses; each has the adapter "law"."""
    servicers = [TargetServicer(ToyTarget(info=with_adapters(target_info(), law="b1"))) for _ in range(targets)]
    async with AsyncExitStack() as stack:
        addresses = []
        for servicer in servicers:
            servicer.num_left = num_left
            addresses.append((await stack.enter_async_context(serving(servicer))).address)
        given = [*arguments, "--target", ",".join(addresses)]
        status = await asyncio.to_thread(main, given)
    return status, servicers, addresses


def names(servicer: TargetServicer) -> list[str]:
    return [adapter.name for adapter in servicer.toy.info.adapters]


async def test_it_is_loaded_at_every_target_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, servicers, addresses = await run("load", "sql=models/sql.peft", targets=2)
    assert status == 0 and [names(servicer) for servicer in servicers] == [["law", "sql"]] * 2
    assert capsys.readouterr().out.splitlines() == [
        f"{address}  loaded sql, rank 8, digest of mo" for address in addresses
    ]
    status, _, (address,) = await run("list")
    assert status == 0 and capsys.readouterr().out == f"{address}  law, rank 8, b1\n"


@pytest.mark.parametrize(
    ("num_left", "told"),
    [(0, "nothing goes on with it"), (1, "1 open sequence goes on with it"), (2, "2 open sequences go on with it")],
)
async def test_what_goes_on_with_one_that_is_unloaded(
    num_left: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, (servicer,), (address,) = await run("unload", "law", num_left=num_left)
    assert status == 0 and names(servicer) == []
    assert capsys.readouterr().out == f"{address}  unloaded law; {told}\n"


async def test_one_that_refuses_is_named_and_the_others_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    status, servicers, addresses = await run("load", "sql=models/pickle", targets=2)
    assert status == 1 and all(names(servicer) == ["law"] for servicer in servicers)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(address in line for address, line in zip(addresses, lines, strict=True))
    assert all("holds no adapter; allowed: a folder in PEFT's layout" in line for line in lines)
    status, _, _ = await run("unload", "sql")
    assert status == 1 and "there is no adapter 'sql'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load"], "adapter: is missing; allowed beside load: NAME=DIR"),
        (["load", "sql"], "adapter: is 'sql'; allowed beside load: NAME=DIR"),
        (["load", "=dir"], "adapter: is '=dir'; allowed beside load: NAME=DIR"),
        (["unload", "sql=dir"], "adapter: is 'sql=dir'; allowed beside unload: NAME"),
        (["list", "sql"], "adapter: is 'sql'; allowed beside list: nothing"),
        (["drop", "sql"], "action"),
        ([], "give the action"),
        (["list", "--target", "nowhere"], "allowed: host:port"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


async def test_a_target_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    given: list[Any] = ["list", "--target", "127.0.0.1:1", "--timeout", "5"]
    assert await asyncio.to_thread(main, given) == 1
    assert "target 127.0.0.1:1: " in capsys.readouterr().err
