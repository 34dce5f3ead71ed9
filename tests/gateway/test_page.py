"""The live page in a real Chromium: what it shows is what the gateway did. Screenshots stay in pytest's cache folder,
.pytest_cache/d/page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gateway.http_harness import gateway
from gateway.page_harness import PHONE, RATIO, visit
from gateway.toys import ToyDraft, ToyTarget, until

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
        assert not seen.complaints
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
