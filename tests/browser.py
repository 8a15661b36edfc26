"""Loads a local page in the installed Chromium, driven by Playwright, and reports what the page became."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
# Boxes are measured after layout: a chart inside a collapsed or zero-height parent counts as missing.
STATE = """() => {
  const images = [...document.images];
  return {
    images: images.length,
    broken: images.filter((i) => !i.complete || i.naturalWidth === 0).map((i) => i.alt || i.src.slice(0, 80)),
    charts: [...document.querySelectorAll("svg[data-chart]")].map((svg) => {
      const box = svg.getBoundingClientRect();
      return [box.width, box.height];
    }),
    width: document.documentElement.scrollWidth,
    text: document.body.innerText,
  };
}"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")


@dataclass(frozen=True, kw_only=True)
class PageState:
    """A loaded page. `width` is that of its content; `requests` are the addresses it loaded, without data: URLs."""

    images: int
    broken: list[str]
    charts: list[list[float]]
    width: int
    text: str
    console: list[str]
    requests: list[str]

    def assert_whole(self, width: int, images: int) -> None:
        """Nothing is broken, too wide or without height, the console is empty, and one file was loaded."""
        assert (self.console, self.broken, self.images) == ([], [], images)
        assert self.width <= width, "the page scrolls sideways"
        assert all(wide > 200 and high > 100 for wide, high in self.charts)
        assert len(self.requests) == 1, self.requests


@contextmanager
def open_browser(
    width: int = 1200, height: int = 900, *, dark: bool = False, touch: bool = False
) -> Iterator[tuple[Any, list[str], list[str]]]:
    """A page in a new browser, what its console says, and the addresses that it loads."""
    from playwright.sync_api import sync_playwright

    console: list[str] = []
    requests: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", has_touch=touch
        )
        page = context.new_page()
        page.on("console", lambda message: console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: console.append(f"exception: {error}"))
        page.on("dialog", lambda dialog: console.append(f"dialog: {dialog.message}") or dialog.dismiss())
        page.on("request", lambda request: requests.append(request.url))
        yield page, console, requests
        browser.close()


def inspect_page(
    path: Path, screenshot: Path, width: int = 1200, height: int = 900, *, dark: bool = False, script: str = ""
) -> PageState:
    """Load a file, run `script` in it, save a screenshot of the whole page and return its state."""
    with open_browser(width, height, dark=dark) as (page, console, requests):
        page.goto(path.resolve().as_uri())
        if script:
            page.evaluate(script)
        state = page.evaluate(STATE)
        page.screenshot(path=screenshot, full_page=True)
    return PageState(**state, console=console, requests=[url for url in requests if not url.startswith("data:")])
