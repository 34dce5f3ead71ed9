"""The live page, opened in a browser."""

from __future__ import annotations

from typing import Any

PHONE = {"width": 375, "height": 812}
WAIT_MS = 20_000
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
