"""Shards by HTTP: servers that list, ignore ranges, change their files, or never answer."""

import contextlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from shard_files import shard_bytes, sound

from leanclip.data import BrokenSample, Shards
from refusal import refuses

SHARD = shard_bytes(sound(6))


class Server(BaseHTTPRequestHandler):
    """Serves /a.tar in ranges, and lists it."""

    etags = True
    ranges = True
    hangs_on: tuple[str, ...] = ()  # methods that never get an answer
    released = threading.Event()
    reads = 0
    content = SHARD
    zeros_below = 0  # shorter answers contain only zeros

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        kind, content = type(self), self.content
        if self.command in self.hangs_on:
            kind.released.wait(20)
            return
        if self.path == "/":
            content = b'<a href="../">up</a> <a href="a.tar">a.tar</a> <a href="notes.txt">notes</a>'
        elif self.path != "/a.tar":
            self.send_error(404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.ranges else None
        start, stop = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(content))
        kind.reads += body
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Type", "text/html" if self.path == "/" else "application/x-tar")
        self.send_header("Content-Length", str(stop - start))
        if self.etags:
            self.send_header("ETag", f'"{hash(content)}"')
        self.end_headers()
        if body:
            with contextlib.suppress(OSError):  # the client closes the connection
                self.wfile.write(content[start:stop] if stop - start >= self.zeros_below else bytes(stop - start))

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def serving(**behaviour):
    """The URL of a running server, and its handler class."""
    handler = type("Handler", (Server,), {"released": threading.Event(), **behaviour})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler
        finally:
            handler.released.set()
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def short_limit(monkeypatch, tmp_path):
    monkeypatch.setattr("leanclip.data.files.REMOTE_SECONDS", 0.5)
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))


def test_a_server_that_lists_its_files_is_read(capfd):
    with serving() as (url, _):
        for pattern in (f"{url}/", f"{url}/*.tar", f"{url}/a.tar"):
            shards = Shards(pattern)
            assert len(shards) == 6 and shards.captions(1) == ["picture number 1"]
            assert shards.image_bytes(5) == sound(6)["00005.jpg"]
    assert "indexing 1 shards" in capfd.readouterr().err


def test_a_server_that_ignores_ranges_is_refused():
    with serving(ranges=False) as (url, handler), refuses("data.unreadable", "ignores range requests"):
        Shards(f"{url}/a.tar")
    assert handler.reads == 1


def test_a_file_that_changes_is_noticed():
    with serving() as (url, handler):
        shards = Shards(f"{url}/a.tar")
        handler.content = shard_bytes(sound(6, start=1))
        assert len(handler.content) == len(SHARD)
        with pytest.raises(BrokenSample, match="changed on the server") as broken:
            shards.image_bytes(0)
        assert broken.value.kind == "vanished"


def test_bytes_that_change_without_a_sign_are_counted(monkeypatch):
    """A header is zeros when it is read alone, and whole when more is read at once."""
    monkeypatch.setattr("leanclip.data.tar.REMOTE_READ_BYTES", 512)
    with serving(zeros_below=1024, etags=False) as (url, handler):
        shards = Shards(f"{url}/a.tar")
        assert 0 < len(shards) <= 6 and shards.broken["header"]
        assert handler.reads < 50


@pytest.mark.parametrize("methods", [("HEAD", "GET"), ("GET",)])
def test_a_server_that_never_answers_is_given_up(methods):
    with serving(hangs_on=methods) as (url, _):
        with refuses("data.unreadable", "no answer within 0.5 s"):
            Shards(f"{url}/a.tar")
        with refuses("data.unreadable", "no answer within 0.5 s"):
            Shards(f"{url}/")


def test_a_missing_file_and_a_missing_server_differ():
    with serving() as (url, _), refuses("data.not_found", "b.tar"):
        Shards(f"{url}/b.tar")
    with refuses("data.unreadable", "127.0.0.1"):
        Shards(f"{url}/a.tar")
