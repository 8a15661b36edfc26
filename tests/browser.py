"""Loads a local page in headless Chromium and says what is wrong with it.

Speaks the DevTools protocol over a pair of pipes: JSON messages that end in a NUL byte. The browser gets no port
and the tests no extra package.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

# The browser reads commands from descriptor 3 and writes answers to 4. A program of its own puts them there:
# a function run between fork and exec is not safe in a process with threads.
LAUNCHER = """
import os, sys
reads, writes = int(sys.argv[1]), int(sys.argv[2])
os.dup2(reads, 3), os.dup2(writes, 4)
os.close(reads), os.close(writes)
os.execv(sys.argv[3], sys.argv[3:])
"""

# Boxes are measured after layout: a chart inside a collapsed or zero-height parent counts as missing.
PROBE = """
(() => {
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
})()
"""


@dataclass(frozen=True, kw_only=True)
class PageState:
    """What the browser made of a page.

    `width` is that of the content: more than the window's means the page scrolls sideways. `requests` are the
    addresses the page loaded, itself included, data inside the page left out.
    """

    console: list[str]
    images: int
    broken: list[str]
    charts: list[tuple[float, float]]
    width: int
    text: str
    requests: list[str]


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class DevTools:
    """One conversation with the browser; events that arrive while an answer is awaited are kept."""

    def __init__(self, to_browser: int, from_browser: int, timeout: float) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.deadline = time.monotonic() + timeout
        self.buffer = b""
        self.count = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self.from_browser], [], [], left)[0]:
                raise TimeoutError("the browser did not answer in time")
            data = os.read(self.from_browser, 1 << 20)
            if not data:
                raise ConnectionError("the browser has ended")
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        event = json.loads(message)
        if event.get("method") == "Page.javascriptDialogOpening":
            # A dialog halts the page until someone answers it.
            raise RuntimeError(f"the page opened a dialog: {event['params']['message']}")
        return event

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to_browser, data) :]
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event: str) -> None:
        while not any(e.get("method") == event for e in self.events):
            self.events.append(self.receive())

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")


def high_pipe() -> tuple[int, int]:
    """A pipe whose ends are clear of descriptors 3 and 4, so that the launcher overwrites neither."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


@contextmanager
def browser(timeout: float) -> Iterator[DevTools]:
    executable = find_browser()
    if executable is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed")
    # The browser's children may still write into the profile while it is being removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        child_reads, we_write = high_pipe()
        we_read, child_writes = high_pipe()
        command = [
            *(sys.executable, "-ISc", LAUNCHER, str(child_reads), str(child_writes)),
            *(executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        ]
        process = subprocess.Popen(
            command,
            pass_fds=(child_reads, child_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_reads)
        os.close(child_writes)
        try:
            yield DevTools(we_write, we_read, timeout)
        finally:
            os.close(we_write)
            os.close(we_read)
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the browser and the children in its process group; it ends by itself once its pipe is closed."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def inspect_page(
    path: Path,
    screenshot: Path,
    width: int = 1200,
    height: int = 900,
    *,
    dark: bool = False,
    action: str = "",
    timeout: float = 90,
) -> PageState:
    """Load a file, run the script `action` if given, save a picture of the whole page and report its state."""
    with browser(timeout) as tools:
        target = tools.call("Target.createTarget", url="about:blank")["targetId"]
        tools.session = tools.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tools.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        tools.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tools.call("Emulation.setEmulatedMedia", features=[scheme])
        tools.events.clear()
        tools.call("Page.navigate", url=path.resolve().as_uri())
        tools.wait_for("Page.loadEventFired")
        if action:
            tools.evaluate(action)
        state = tools.evaluate(PROBE)
        picture = tools.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        screenshot.write_bytes(base64.b64decode(picture["data"]))
        return PageState(
            console=list(messages(tools.events)),
            images=state["images"],
            broken=state["broken"],
            charts=[(w, h) for w, h in state["charts"]],
            width=state["width"],
            text=state["text"],
            requests=requests(tools.events),
        )


def requests(events: list[dict[str, Any]]) -> list[str]:
    urls = (e["params"]["request"]["url"] for e in events if e.get("method") == "Network.requestWillBeSent")
    return [url for url in urls if not url.startswith("data:")]


def messages(events: list[dict[str, Any]]) -> Iterator[str]:
    """What the console of the page shows: its own messages, uncaught errors, and what the browser adds."""
    for event in events:
        params = event.get("params", {})
        if event.get("method") == "Runtime.consoleAPICalled":
            texts = (str(a.get("value", a.get("description", ""))) for a in params["args"])
            yield f"{params['type']}: {' '.join(texts)}"
        elif event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            yield f"exception: {details.get('exception', {}).get('description', details['text'])}"
        elif event.get("method") == "Log.entryAdded":
            yield f"{params['entry']['level']}: {params['entry']['text']}"
