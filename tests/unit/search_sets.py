"""Embedded shards for the tests of search, with names and captions that a page must not trust."""

import contextlib
import io
import json
import threading
from email.message import Message
from http.client import HTTPConnection
from typing import Any

import numpy as np
from PIL import Image
from shard_files import write_shard

from refusal import exit_code

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
FIRST, SECOND = "000.tar", "<b>one.tar"


def image_of(number, kind="PNG"):
    """Squares of random colours: no two numbers look alike."""
    pixels = np.random.default_rng(number).choice(np.array([0, 255], np.uint8), (4, 4, 3)).repeat(8, 0).repeat(8, 1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_hostile_shards(folder):
    """40 samples in two shards. Number 5 is broken, 7 and 33 have the same image, 3 and 4 hostile texts."""
    folder.mkdir()
    files = {}
    for number in range(40):
        key = f"k{number:02d}" if number != 4 else "k'\"><svg onload=alert(3)>"
        files[f"{key}.png"] = image_of(7 if number == 33 else number)
        files[f"{key}.txt"] = (SCRIPT if number == 3 else f"square number {number}").encode()
    files["k05.png"] = b"no image"
    items = list(files.items())
    write_shard(folder / FIRST, dict(items[:40]))
    write_shard(folder / SECOND, dict(items[40:]))
    return folder


def embed(model, data, out):
    assert exit_code("embed", model, data, out, "--device", "cpu", "--workers", 0) == 0
    return out


@contextlib.contextmanager
def serving(engine, **options):
    from leanclip.search.server import SearchServer

    with SearchServer(engine, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def request(server, method, path, body=None, **headers) -> tuple[int, Message, Any]:
    """Status, headers and content of an answer; JSON is parsed."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    if isinstance(body, dict):
        body, headers = json.dumps(body).encode(), {"Content-Type": "application/json"} | headers
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.headers.get_content_type() == "application/json":
        content = json.loads(content)
    return answer.status, answer.headers, content
