"""The live page in a real Chromium: what it shows is what the gateway did; and the README's "First OpenAI call",
line by line, with the page of what it starts. Screenshots stay in pytest's cache folder, .pytest_cache/d/page. Where
there is no Chromium, a test that asks for it is skipped."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.environment import START_S
from support.fakes import ToyDraft, ToyTarget, target_info, until
from support.gateways import gateway

from outrider.rpc.words.sampling_params import CAPABILITIES
from outrider.rpc.words.structured import StructuredOutput

PHONE = {"width": 375, "height": 812}
WAIT_MS = 20_000
MOST_ASKING_S = 150.0  # a draft that a busy machine makes late is set aside for a while, and answers after
# The contrast of an element's text with what is behind it.
RATIO = """
(selectors) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour) => rgb(colour).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(node.parentElement) : colour;
  };
  return Object.fromEntries(selectors.map((selector) => {
    const node = document.querySelector(selector);
    const pair = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
    return [selector, (pair[0] + 0.05) / (pair[1] + 0.05)];
  }));
}
"""


class Visit:
    """An open page, and what it complained of."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url) if "/live" in request.url else None)

    async def generate(self, wait: bool = True, mode: str = "", **fields: str) -> None:
        await self.page.goto(self.url)
        await self.page.select_option("#mode", mode)
        for name, value in fields.items():
            await self.page.fill(f"#{name}", value)
        await self.page.click("#go")
        if wait:
            await self.page.wait_for_selector("#go:enabled", timeout=WAIT_MS)

    async def text(self, selector: str) -> str:
        return str(await self.page.inner_text(selector))

    async def count(self, selector: str) -> int:
        return int(await self.page.locator(selector).count())

    async def modes(self) -> list[str]:
        """What the waterfall's first lane says, from left to right."""
        nodes = self.page.locator("#waterfall .mode title")
        return [str(text) for text in await nodes.all_text_contents()]


async def visit(browser: Any, url: str, **options: Any) -> Visit:
    page = await browser.new_page(**{"viewport": {"width": 1200, "height": 1000}, **options})
    return Visit(page, url)


PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Root may use no sandbox, and a browser that looks for updates waits on a closed network.
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Any]:
    reason = "no package playwright: pip install playwright"
    playwright = pytest.importorskip("playwright.async_api", reason=reason)
    async with playwright.async_playwright() as driver:
        program = next(filter(None, map(shutil.which, (driver.chromium.executable_path, *PROGRAMS))), None)
        if program is None:
            pytest.skip("no Chromium on this machine: playwright install chromium, or the system's package chromium")
        running = await driver.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield running
        finally:
            await running.close()


@pytest.fixture(scope="module")
def pictures(pytestconfig: pytest.Config) -> Path:
    """Where screenshots stay: pytest's cache folder, .pytest_cache/d/page."""
    return Path(pytestconfig.cache.mkdir("page"))


# Every stream that the page opens, kept.
SOURCES = """
window.sources = [];
window.EventSource = class extends EventSource {
  constructor(url) { super(url); sources.push(this); }
};
"""


async def test_shows_what_the_gateway_did(browser: Any, pictures: Path) -> None:
    async with gateway(ToyTarget(step_s=0.004), ToyDraft(wrong_every=5, delay_s=0.002)) as served:
        seen = await visit(browser, served.url)
        await seen.generate(prompt="the quick brown fox", max_tokens="60")
        counts = {
            origin: await seen.count(f"#text .{origin}") for origin in ("accepted", "recovered", "bonus", "plain")
        }
        assert sum(counts.values()) == 60 and counts["accepted"] > counts["recovered"] > 0 and counts["bonus"] > 0
        legend = await seen.text("#legend")
        assert all(f"{origin} {count}" in legend for origin, count in counts.items())
        colours = {await seen.page.eval_on_selector(f"#text .{o}", "node => getComputedStyle(node).backgroundColor")
                   for o, count in counts.items() if count}  # fmt: skip
        assert len(colours) == sum(count > 0 for count in counts.values())
        rounds = int((await seen.text("#scale")).split()[0])
        assert await seen.count("#waterfall rect.part") == 5 * rounds > 20  # draft, wire, queue, verify, sample
        titles = await seen.page.eval_on_selector_all(
            "#waterfall title", "nodes => nodes.map(node => node.textContent)"
        )
        assert sum("draft: 0.10 ms" in title for title in titles) == rounds
        assert await seen.modes() == ["sequential, 4"]
        assert "position 1" in await seen.text("#positions") and "%" in await seen.text("#rate")
        assert float(await seen.text("#speed")) > 0 and float(await seen.text("#length")) > 1
        assert float((await seen.text("#gain")).split()[0]) > 0 and await seen.text("#same") == "the same text"
        assert [("speculate=1" in url, "speculate=0" in url) for url in seen.asked] == [(True, False), (False, True)]
        assert "toy, drafted for by toy-draft" in await seen.text("#models") and not seen.complaints
        assert len(served.target.opens) == 2
        await seen.page.screenshot(path=pictures / "desktop-light.png", full_page=True)
        await seen.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_is_readable_on_a_phone_in_both_schemes(browser: Any, pictures: Path, scheme: str) -> None:
    async with gateway(ToyTarget(step_s=0.002), ToyDraft(wrong_every=4)) as served:
        seen = await visit(browser, served.url, viewport=PHONE, color_scheme=scheme, is_mobile=True)
        await seen.generate(prompt="the quick brown fox", max_tokens="40")
        assert await seen.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        origins = [
            f"#text .{origin}" for origin in ("accepted", "recovered", "bonus") if await seen.count(f"#text .{origin}")
        ]
        selectors = ["body", "#prompt", "#go", "small", ".soft", "#names div", "#same", "#gain", *origins]
        ratios = await seen.page.evaluate(RATIO, selectors)
        assert min(ratios.values()) >= 4.5, ratios
        background = await seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(247, 247, 244)", "dark": "rgb(20, 23, 26)"}[scheme]
        assert not seen.complaints
        await seen.page.screenshot(path=pictures / f"phone-{scheme}.png", full_page=True)
        await seen.page.set_viewport_size({"width": 1200, "height": 1000})
        await seen.page.screenshot(path=pictures / f"desktop-after-phone-{scheme}.png", full_page=True)
        await seen.page.close()


def round_of(start_us: int, draft_us: int, wire_us: int) -> dict[str, int]:
    """A millisecond long, of which the target takes 800 µs."""
    parts = {"draft_us": draft_us, "wire_us": wire_us, "queue_us": 50, "verify_us": 700, "sample_us": 50}
    return {"start_us": start_us, "end_us": start_us + 1000, **parts}


async def test_lanes_lie_over_one_another_where_the_times_do(browser: Any) -> None:
    """In lock-step one part follows the other. A draft that ran ahead worked while its round was verified."""
    lock_step, ahead, longer = round_of(1000, 150, 50), round_of(2000, 600, 0), round_of(3000, 1200, 0)
    async with gateway() as served:
        seen = await visit(browser, served.url)
        await seen.page.goto(served.url)
        rows = await seen.page.evaluate("rounds => rounds.map(partsOf)", [lock_step, ahead, longer])
        at = [{part["lane"]: (part["start"], part["start"] + part["length"]) for part in row} for row in rows]
        order = ("draft", "wire", "queue", "verify", "sample")
        assert [at[0][lane] for lane in order] == [
            (1000, 1150), (1150, 1200), (1200, 1250), (1250, 1950), (1950, 2000)
        ]  # fmt: skip
        assert at[1]["draft"] == (2000, 2600) and at[1]["verify"] == (2250, 2950)
        assert at[2]["draft"] == (2800, 4000)  # ... and before it, while the one before was verified
        shares = [await seen.page.evaluate("round => overlap([round])", row) for row in (lock_step, ahead, longer)]
        assert shares == [0, 350 / 600, 700 / 1200]
        await seen.page.close()


async def test_the_mode_is_asked_for_and_shown(browser: Any) -> None:
    async with gateway(draft=ToyDraft(wrong_every=7)) as served:
        seen = await visit(browser, served.url)
        await seen.generate(prompt="the quick brown fox", max_tokens="60", mode="chains", k="3")
        assert ["mode=chains" in url and "k=3" in url for url in seen.asked] == [True, True]
        assert await seen.modes() == ["chains, 3"]
        await seen.generate(prompt="the quick brown fox", max_tokens="60", k="0")
        assert await seen.modes() == ["off"] and await seen.text("#rate") == "none drafted"
        assert "no tokens were to be drafted" in await seen.text("#speeds") and not await seen.count("#speeds .bar")
        assert len(await seen.text("#gain")) == 1  # a dash
        await seen.page.fill("#k", "")
        await seen.page.select_option("#mode", "auto")
        await seen.page.evaluate(
            "one = { text: '', rounds: [1, 2].map((end_us) => ({ end_us, tokens: [0], drafted: 0 })) };"
            "compare(one, one)"
        )
        assert "auto measures what drafting costs, and here it did not pay" in await seen.text("#speeds")
        assert len(await seen.text("#gain")) == 1 and not await seen.count("#speeds .bar")
        assert not seen.complaints
        await seen.page.close()


async def test_a_constraint_is_asked_for_and_shown(browser: Any, pictures: Path) -> None:
    capabilities = (*CAPABILITIES, "sampling.structured_output")
    target = ToyTarget(info=replace(target_info(), capabilities=capabilities), num_forced=2)
    async with gateway(target, ToyDraft(wrong_every=5)) as served:
        seen = await visit(browser, served.url)
        await seen.generate(max_tokens="30")
        assert not await seen.page.is_visible("#constrained") and not await seen.page.is_visible("#match")
        await seen.page.select_option("#constraint", "regex")
        await seen.page.fill("#match", "[ab]+")
        await seen.page.fill("#max_tokens", "60")
        await seen.page.click("#go")
        await seen.page.wait_for_selector("#go:enabled", timeout=WAIT_MS)
        constrained, plain = target.opens[-2:]
        assert (
            constrained.sampling.structured_output
            == StructuredOutput(regex="[ab]+")
            == (plain.sampling.structured_output)
        )
        kept, forced = map(int, (await seen.text("#forced")).split(" of "))
        assert 0 < kept < forced and await seen.text("#kind") == "regex"
        assert await seen.text("#compiled") == "1.5 ms" and float((await seen.text("#masks")).split()[0]) > 0
        titles = await seen.page.locator("#waterfall .part title").all_text_contents()
        assert any(title.endswith("of 2 forced") for title in titles) and not seen.complaints
        assert await seen.page.evaluate("document.documentElement.scrollWidth") <= 1200
        await seen.page.screenshot(path=pictures / "constraint.png", full_page=True)
        await seen.page.close()


async def test_says_what_is_wrong_and_does_not_ask_again(browser: Any) -> None:
    """An EventSource that is left open asks again by itself, and so would generate again."""
    async with gateway() as served:
        seen = await visit(browser, served.url)
        await seen.page.add_init_script(SOURCES)
        await seen.generate(max_tokens="100000")
        assert "max_tokens: is 100000; allowed:" in await seen.text("#failure")
        assert await seen.page.evaluate("sources.map((one) => one.readyState === EventSource.CLOSED)") == [True]
        assert len(seen.asked) == 1 and not served.target.opens
        await seen.page.close()


async def test_stop_ends_the_request(browser: Any) -> None:
    target, draft = ToyTarget(step_s=0.05), ToyDraft(delay_s=0.05)
    async with gateway(target, draft) as served:
        seen = await visit(browser, served.url)
        await seen.generate(wait=False, max_tokens="200")
        await seen.page.wait_for_selector("#text span")
        await seen.page.click("#stop")
        await until(lambda: target.num_closed == draft.num_closed == 1)
        await seen.page.wait_for_selector("#go:enabled")
        assert len(seen.asked) == 1 and not await seen.count("#speeds .bar")
        await seen.page.close()


async def test_hostile_text_is_text(browser: Any) -> None:
    """Generated markup is shown, not obeyed; the page may load nothing but its own gateway's answers."""
    async with gateway() as served, served.client() as client:
        answer = await client.get("/")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text and "https://" not in answer.text
        seen = await visit(browser, served.url)
        await seen.page.goto(served.url)
        await seen.page.evaluate("showToken({ text: '<img src=x onerror=alert(1)>', origin: 'plain' })")
        assert await seen.text("#text") == "<img src=x onerror=alert(1)>" and not await seen.count("#text img")
        await seen.page.close()


INSTALLS = ["make install", ". .venv/bin/activate"]  # what stands before; here it is installed
NAMED = "127.0.0.1:8000"
READY = "Ctrl-C ends all three."


def block(repository: Path, language: str) -> str:
    """The section's one block of a language."""
    text = (repository / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## First OpenAI call\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    (one,) = re.findall(rf"^```{language}\n(.*?)^```", found[1], re.MULTILINE | re.DOTALL)
    return str(one)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return f"127.0.0.1:{bound.getsockname()[1]}"


class Reader:
    """Does what the README says, on another port: the one that it names may be taken."""

    def __init__(self, repository: Path, log: Path) -> None:
        self._repository, self._log, self._address = repository, log, free_address()
        *installs, command = block(repository, "sh").splitlines()
        assert installs == INSTALLS
        program, *arguments = shlex.split(command.replace(NAMED, self._address))
        own = {"OUTRIDER_GATEWAY__LISTEN": "127.0.0.1:0", "OUTRIDER_TARGET__THREADS": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name(program), *arguments],
                env=os.environ | own, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://{self._address}"

    def waits(self) -> None:
        end = time.monotonic() + START_S
        while READY not in self._log.read_text():
            assert self.process.poll() is None and time.monotonic() < end, self._log.read_text()
            time.sleep(0.05)

    def runs_python(self) -> str:
        code = block(self._repository, "python").replace(NAMED, self._address)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def reader(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reading = Reader(repository, tmp_path_factory.mktemp("reader") / "serve.log")
    try:
        reading.waits()
        yield reading
    finally:
        reading.process.terminate()
        try:
            reading.process.wait(60)
        finally:
            reading.process.kill()
            reading.process.wait()


def test_the_first_call(reader: Reader) -> None:
    printed = reader.runs_python()
    body = {"model": "python", "prompt": "def parse_args(argv):", "max_tokens": 48, "temperature": 0}
    again = httpx.post(f"{reader.url}/v1/completions", json={**body, "speculation": {}}, timeout=30).json()
    choice = again["choices"][0]
    assert printed.startswith(choice["text"] + "\n") and "'num_rounds': " in printed
    did = choice["speculation"]
    assert sum(did["num_rounds_by_mode"].values()) == did["num_rounds"] > 0  # whether it drafts is the controller's


@pytest.mark.parametrize(("name", "options"), [
    ("light", {}),
    ("dark", {"color_scheme": "dark"}),
    ("phone", {"viewport": PHONE, "is_mobile": True}),
])  # fmt: skip
async def test_the_page_of_the_embedded_pair(
    reader: Reader, browser: Any, pictures: Path, name: str, options: dict[str, Any]
) -> None:
    seen = await visit(browser, reader.url, **options)
    accepted, end = 0, time.monotonic() + MOST_ASKING_S
    while not accepted and time.monotonic() < end:
        await seen.generate(prompt='def parse_args(argv):\n    """', max_tokens="64", mode="chains", k="4")
        assert not await seen.text("#failure") and not seen.complaints
        accepted = await seen.count("#text .accepted")
        await asyncio.sleep(0 if accepted else 2)
    assert accepted > 0 and await seen.modes() == ["chains, 4"]
    assert re.search(r"\d+ after the prompt's, [\d.]+ ms each", await seen.text("#scale"))
    assert "position 1" in await seen.text("#positions") and float((await seen.text("#gain")).split()[0]) > 0
    await seen.page.screenshot(path=pictures / f"embedded-pair-{name}.png", full_page=True)
    await seen.page.close()


def test_ctrl_c_ends_it(reader: Reader) -> None:
    reader.process.send_signal(signal.SIGINT)
    assert reader.process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{reader.url}/health")
