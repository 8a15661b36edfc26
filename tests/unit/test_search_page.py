"""The search page in a browser: sentences, images, keyboard, classes, duplicates, narrow and dark."""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
from search_sets import FIRST, SCRIPT, SECOND, embed, image_of, serving, write_hostile_shards

from browser import needs_browser, open_browser
from leanclip.data.datasets import BUNDLED
from leanclip.search.duplicates import PairSearch
from leanclip.search.engine import open_engine
from refusal import exit_code

pytestmark = [needs_browser, pytest.mark.timeout(180)]
DROP = """async (bytes) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
  for (const kind of ["dragenter", "dragover", "drop"])
    document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""
KEYS = '[...document.querySelectorAll("#results .card")].map((card) => card.dataset.key)'


@pytest.fixture(scope="module")
def server(small_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    out = embed(small_run, write_hostile_shards(folder / "shards"), folder / "out")
    suspects = [
        {"id": index, "key": f"k{index:02d}", "shard": FIRST, "caption": SCRIPT, "score": "nan", "rank": rank,
         "probability": 0.5}
        for rank, index in enumerate((3, 5), 1)
    ]  # fmt: skip
    with serving(open_engine(str(out), device="cpu"), suspects=suspects) as running:
        yield running


def until(page, expression, value=True):
    """Wait for a value on the page. Playwright's own way needs eval, which the page's policy forbids."""
    for _ in range(1500):
        if page.evaluate(expression) == value:
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{expression} is {page.evaluate(expression)!r}, not {value!r}")


def wait_for(page, text):
    until(page, f"document.getElementById('status').textContent.includes({json.dumps(text)})")


def settled(page):
    """All images that are in view have loaded, and nothing is wider than the window."""
    until(page, "[...document.images].every((image) => image.complete || image.loading === 'lazy')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@contextlib.contextmanager
def open_page(server, width=400, *, dark=False, at=""):
    """The page and what it loads. Nothing may come from elsewhere, and at the end the console is empty."""
    with open_browser(width, 900, dark=dark) as (page, console, requests):
        page.goto(server.url + at)
        yield page, requests
        assert [url for url in requests if not url.startswith((server.url, "data:"))] == []
        # Chromium itself notes an image that the server could not give.
        assert [line for line in console if "400 (Bad Request)" not in line] == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_sentence_image_and_keyboard(server, width, dark):
    with open_page(server, width, dark=dark) as (page, requests):
        until(page, "document.activeElement.id === 'text'")
        page.keyboard.type("square number 3")
        page.keyboard.press("Enter")
        wait_for(page, "nearest to “square number 3”")
        assert page.locator(".card").count() == 30
        settled(page)
        page.click("#more")
        until(page, "document.querySelectorAll('.card').length === 39")
        assert page.locator("#more").is_hidden()
        shown = page.inner_text("#results")
        assert SCRIPT in shown and "<svg onload=alert(3)>" in shown  # as text
        images = [url for url in requests if "/image/" in url]
        assert images and all(f"?token={server.token}" in url for url in images)

        page.evaluate(DROP, list(image_of(7)))
        wait_for(page, "nearest to dropped.png")
        assert set(page.evaluate(KEYS)[:2]) == {"k07", "k33"} and page.locator("#drop").is_hidden()

        page.keyboard.press("/")
        page.keyboard.press("ArrowDown")
        first, second = page.evaluate(KEYS)[:2]
        assert page.evaluate("document.activeElement.dataset.key") == first
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.key") == second
        page.keyboard.press(" ")
        assert page.locator("#large").is_visible() and second in page.inner_text("#large-key")
        page.keyboard.press("Escape")
        page.wait_for_selector("#large", state="hidden")
        page.keyboard.press("c")
        wait_for(page, f"copied {second}")
        page.keyboard.press("Enter")
        wait_for(page, f"more like {second}")
        assert page.evaluate(KEYS)[0] in ("k07", "k33")

        page.select_option("#shard", label=f"{SECOND} (20)")
        until(page, "document.querySelectorAll('.card').length === 20")
        page.click("#copy")
        wait_for(page, "copied 20 keys")


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (400, False)])
def test_classes_duplicates_and_suspects(server, width, dark):
    with open_page(server, width, dark=dark) as (page, _):
        page.wait_for_selector("#tab-suspects")
        page.focus("#tab-search")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Tab")
        page.keyboard.type(f"square number 1\n{SCRIPT}\na dog")
        page.click("#sort .main")
        wait_for(page, "the doubtful ones first")
        counts = [text.rpartition(": ") for text in page.locator("#counts button").all_inner_texts()]
        assert [name for name, _, _ in counts] == ["square number 1", SCRIPT, "a dog"]
        assert sum(int(count) for _, _, count in counts) == 39
        with page.expect_download() as download:
            page.click("#csv")
        assert download.value.path().read_text().count("\n") == 40
        settled(page)

        page.click("#tab-duplicates")
        page.fill("#threshold", "0.9999")
        page.keyboard.press("Enter")
        wait_for(page, "with a score of at least 0.9999")
        assert {"k07", "k33"} <= set(page.evaluate(KEYS))
        settled(page)
        page.fill("#threshold", "1")
        page.evaluate("document.getElementById('pairs').requestSubmit()")
        until(page, "/no such pairs|at least 1$/.test(document.getElementById('status').textContent)")

        page.click("#tab-suspects")
        wait_for(page, "2 suspects")
        page.wait_for_selector(".none")  # the broken one says so in place of its image
        until(page, "document.querySelector('.none').textContent.includes('it was read from')")
        settled(page)


def test_mistakes_are_said_on_the_page(server, monkeypatch):
    def fail(search, index, ids):
        raise IndexError("out of range")

    monkeypatch.setattr(PairSearch, "_compare_all", fail)
    monkeypatch.setattr(server.engine, "_pairs", None)
    with open_page(server) as (page, _):
        page.click("#search .main")
        wait_for(page, "type a sentence")
        page.evaluate(DROP, [1, 2, 3])
        wait_for(page, "the image cannot be read")
        page.evaluate("state.info.upload_bytes = 2 ** 20")
        page.evaluate(DROP, [0] * (2**20 + 1))
        wait_for(page, "at most 1 MiB are read")
        page.click("#tab-duplicates")
        page.keyboard.press("Tab")
        page.evaluate("document.getElementById('pairs').requestSubmit()")
        wait_for(page, "the images could not be compared (IndexError: out of range)")


def test_a_link_to_a_search(server):
    with open_page(server, at="#text=square%20number%203") as (page, _):
        wait_for(page, "nearest to “square number 3”")
        assert page.input_value("#text") == "square number 3" and page.locator(".card").count() == 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_finds_the_emoji_by_their_names(tmp_path, monkeypatch):
    """make demo, then the command that it prints: each of the 200 held-out captions typed into the page."""
    monkeypatch.chdir(tmp_path)
    recipe = (Path(__file__).parents[2] / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    *commands, search = [line.split() for line in re.findall(r"\$\(BIN\)/leanclip ([^'\n]+)", recipe)]
    assert [command[0] for command in (*commands, search)] == ["train", "evaluate", "embed", "report", "search"]
    for command in commands:
        assert exit_code(*command) == 0
    engine = open_engine(search[1])
    assert f"leanclip {' '.join(search)}" in Path("logs/demo/report.html").read_text()
    rows = [json.loads(line) for line in (BUNDLED / "meta.jsonl").read_text().splitlines()]
    expected = {row["key"] for row in rows if row["split"] == "val"}
    names = {engine.store.key(index): engine.caption(index) for index in range(engine.store.samples)}
    assert set(names) == expected and len(names) == 200
    with serving(engine) as running, open_browser(1280, 900) as (page, console, _):
        page.goto(running.url)
        found, start = 0, time.monotonic()
        for key, name in names.items():
            page.fill("#text", name)
            page.press("#text", "Enter")
            wait_for(page, f"nearest to “{name}”")
            found += key in page.evaluate(KEYS)[:10]
        print(f"{found / 200:.1%} of 200 in {time.monotonic() - start:.1f} s")
        assert found >= 0.6 * 200
        image = engine.source.image_bytes(17)
        page.evaluate(DROP, list(image))
        wait_for(page, "nearest to dropped.png")
        assert page.evaluate(KEYS)[0] == engine.store.key(17)
        assert console == []
