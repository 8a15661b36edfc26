"""The page's server: Python's own, one thread for each request, for a person at this machine.

It answers its own page alone. Every request must name a host that this machine is (a name that an attacker's DNS
points here is refused) and, if it names an origin, that of the page. Nothing is read by path: a sample is a number,
and the page's files are three. What a request may send, and how many requests run at a time, is bounded.
"""

import csv
import io
import ipaddress
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from leanclip.errors import first_line
from leanclip.filesystem import parse_json
from leanclip.models import TEMPLATES
from leanclip.search.engine import Engine, RequestError

MAX_UPLOAD_BYTES, MAX_JSON_BYTES = 32 << 20, 256 << 10
SECONDS, BODY_SECONDS = 10, 30  # that a client may take to send a request, and what comes with it
REQUESTS_AT_ONCE, UPLOADS_AT_ONCE = 64, 8
THUMBNAIL_PIXELS, LARGE_PIXELS = 256, 1024
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Reply(NamedTuple):
    content: bytes
    kind: str = "application/json"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Cache-Control", "no-store"),)


class Refused(Exception):  # noqa: N818 - an answer, not a failure of the server
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class SearchServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, engine: Engine, host: str, port: int, *, suspects: list[dict[str, Any]] | None = None) -> None:
        self.engine, self.suspects, self.host = engine, suspects, host
        self.token = secrets.token_hex(8)  # in addresses of images: the next server on this port has other images
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(REQUESTS_AT_ONCE)
        self.uploads = threading.BoundedSemaphore(UPLOADS_AT_ONCE)  # each is held in memory
        super().__init__((host, port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        host = self.host
        if host in ("0.0.0.0", "::", ""):
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._slots.acquire()  # further clients wait in the queue of the socket
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a client that went away is no error
            print(f"leanclip search: {first_line(error) if error else 'error'}", file=sys.stderr)

    def allows_host(self, header: str | None) -> bool:
        """Whether a Host header names this machine: an address, localhost, or the name that was given."""
        name, port = _host_and_port(header or "")
        if port != self.port and not (port is None and self.port == 80):
            return False
        names = {"localhost", self.host.lower()} | ({socket.gethostname().lower()} if not self._loopback else set())
        if name in names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback if self._loopback else True

    @property
    def _loopback(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _host_and_port(header: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(f"//{header}")
        if parts.path or parts.query or parts.username is not None:
            return "", None
        return (parts.hostname or "").lower(), parts.port
    except ValueError:
        return "", None


class _Received(io.RawIOBase):
    """What a client sends, until a deadline for all of it: one byte from time to time does not keep a thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, time.monotonic() + SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: SearchServer  # type: ignore[assignment]
    server_version, sys_version = "leanclip", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.received = _Received(self.connection)
        self.rfile = io.BufferedReader(self.received)

    def do_GET(self) -> None:
        self._answer(GET)

    def do_HEAD(self) -> None:
        self._answer(GET)

    def do_POST(self) -> None:
        self._answer(POST)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses: a request that it cannot parse, or an unknown method."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or ""
        self._send(_json({"error": HTTPStatus(code).phrase}, code))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed: they hold what the person is looking for."""

    def _answer(self, routes: "dict[str, Callable[[_Handler, str], Reply]]") -> None:
        try:
            try:
                self.parts = urlsplit(self.path)
                self.values = parse_qs(self.parts.query, max_num_fields=16)
            except ValueError as error:
                raise Refused(HTTPStatus.BAD_REQUEST, "the address cannot be read") from error
            self._check_origin()
            path = self.parts.path
            name = path if path in routes else f"{path.rpartition('/')[0]}/"
            if path in FILES and routes is GET:
                reply = _file(path)
            elif name in routes:
                reply = routes[name](self, path.removeprefix(name))
            else:
                raise Refused(HTTPStatus.NOT_FOUND, "there is no such page")
        except Refused as refusal:
            reply = _json({"error": str(refusal)}, refusal.status)
        except RequestError as error:
            reply = _json({"error": str(error)}, HTTPStatus.BAD_REQUEST)
        except (TimeoutError, ConnectionError):
            self.close_connection = True
            return
        except Exception as error:  # the server goes on, and says nothing about itself
            print(f"leanclip search: {first_line(error)}", file=sys.stderr)
            reply = _json({"error": "the request failed; see the terminal"}, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        self.connection.settimeout(SECONDS)
        self.send_response(reply.status)
        sizes = (("Content-Type", reply.kind), ("Content-Length", str(len(reply.content))))
        for name, value in (*sizes, *reply.headers, *HEADERS.items()):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.content)

    def _check_origin(self) -> None:
        if not self.server.allows_host(self.headers.get("Host")):
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, f"open {self.server.url}; this server has no other name")
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        if origin is not None and origin.lower() != f"http://{self.headers['Host']}".lower():
            raise Refused(HTTPStatus.FORBIDDEN, "requests from other pages are refused")
        opened = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.parts.path == "/"
        if site not in (None, "same-origin", "none") and not opened:
            raise Refused(HTTPStatus.FORBIDDEN, "requests from other pages are refused")

    def query(self, name: str) -> str | None:
        values = self.values.get(name)
        return values[0] if values else None

    def number(self, name: str) -> int:
        """0 where the address has none of this name."""
        return as_number(self.query(name) or 0)

    def body(self, limit: int, kinds: tuple[str, ...]) -> bytes:
        """What was sent. A page of another origin cannot send these kinds without asking first."""
        kind = (self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if not kind.startswith(kinds):
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {' or '.join(kinds)}")
        length = self.headers.get("Content-Length") or ""
        if not length.isascii() or not length.isdigit() or len(length) > 12 or "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "send the length of the content")
        self.received.deadline = time.monotonic() + BODY_SECONDS
        try:
            content = self.rfile.read(int(length)) if int(length) <= limit else self._discard(int(length))
        except TimeoutError as error:
            message = f"the content did not arrive within {BODY_SECONDS} seconds"
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, message) from error
        if int(length) > limit:
            size, most = int(length) / 2**20, limit / 2**20
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{size:,.1f} MiB were sent; at most {most:g} MiB are read"
            )
        if len(content) < int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, "the content is shorter than its length")
        return content

    def _discard(self, length: int) -> bytes:
        """Read what is refused, up to a bound: a client that is still sending would not see the answer."""
        left = min(length, 8 * MAX_UPLOAD_BYTES)
        while left > 0 and (part := self.rfile.read(min(left, 1 << 20))):
            left -= len(part)
        return b""

    def json_body(self) -> dict[str, Any]:
        try:
            content = parse_json(self.body(MAX_JSON_BYTES, ("application/json",)))
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, "the content is no JSON") from error
        if not isinstance(content, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "the content is no JSON object")
        return content


def as_number(value: Any) -> int:
    """A whole number of a request, of a size that an id can have."""
    text = value.strip() if isinstance(value, str) else str(value) if type(value) is int else ""
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 15:
        raise Refused(HTTPStatus.BAD_REQUEST, "a number is needed")
    return int(text)


def _json(content: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(content, allow_nan=False).encode(), status=status)


def _file(path: str) -> Reply:
    name, kind = FILES[path]
    return Reply((resources.files("leanclip.search") / name).read_bytes(), kind)


# ---- what the page asks for


def _info(handler: _Handler, rest: str) -> Reply:
    engine, server = handler.server.engine, handler.server
    bounds = [shard.first for shard in engine.store.shards] + [engine.store.samples]
    shards = [
        {"name": shard.name, "samples": bounds[number + 1] - bounds[number]}
        for number, shard in enumerate(engine.store.shards[:10_000])
    ]
    return _json({
        "data": engine.store.facts["data"]["location"],
        "model": engine.store.facts["model"]["place"],
        "samples": engine.store.samples,
        "images": int(engine.usable.sum()),
        "approximate": engine.index.approximate,
        "shards": shards,
        "suspects": None if server.suspects is None else len(server.suspects),
        "templates": ["plain", *TEMPLATES],
        "upload_bytes": MAX_UPLOAD_BYTES,
        "token": server.token,
    })  # fmt: skip


def _image(handler: _Handler, rest: str) -> Reply:
    """Cached by the browser if the address names this server."""
    if (token := handler.query("token")) not in (None, handler.server.token):
        raise Refused(HTTPStatus.GONE, "the page is of an earlier leanclip search; reload it")
    pixels = LARGE_PIXELS if handler.query("large") else THUMBNAIL_PIXELS
    content = handler.server.engine.thumbnail(as_number(rest), pixels)
    return Reply(
        content, "image/jpeg", headers=(("Cache-Control", "private, max-age=3600" if token else "no-store"),)
    )


def _search(handler: _Handler, rest: str) -> Reply:
    """By a sentence, or by the number of a sample."""
    engine, request = handler.server.engine, handler.json_body()
    if isinstance(request.get("text"), str):
        query = engine.of_text(request["text"])
    else:
        query = engine.of_sample(as_number(request.get("id")))
    return _hits(engine, query, {name: request.get(name) for name in ("count", "offset", "shard")})


def _search_image(handler: _Handler, rest: str) -> Reply:
    options = {name: handler.query(name) for name in ("count", "offset", "shard")}
    engine = handler.server.engine
    with handler.server.uploads:
        query = engine.of_image(handler.body(MAX_UPLOAD_BYTES, ("image/", "application/octet-stream")))
    return _hits(engine, query, options)


def _hits(engine: Engine, query: Any, options: dict[str, Any]) -> Reply:
    numbers = {name: as_number(value) for name, value in options.items() if value not in (None, "")}
    return _json({"hits": [hit._asdict() for hit in engine.nearest(query, **numbers)]})


def _duplicates(handler: _Handler, rest: str) -> Reply:
    engine = handler.server.engine
    try:
        threshold = round(float(handler.query("threshold") or 0.95), 4)
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, "the threshold is no number") from error
    search, offset = engine.pairs(threshold), max(0, handler.number("offset"))
    finished = search.finished  # before the rest, which does not change afterwards
    if search.error is not None:
        raise RequestError(search.error)
    total, shown = search.count(threshold), []
    for row in range(offset, min(offset + 30, total)) if finished else ():
        score = float(search.scores[row])
        shown.append([engine.hit(index, score)._asdict() for index in search.pairs[row].tolist()])
    return _json({"finished": finished, "done": search.done, "total": total, "pairs": shown})


def _suspects(handler: _Handler, rest: str) -> Reply:
    rows, offset = handler.server.suspects or [], max(0, handler.number("offset"))
    return _json({
        "total": len(rows), "rows": [{k: _shown(v) for k, v in row.items()} for row in rows[offset : offset + 60]]
    })  # fmt: skip


def _shown(value: Any) -> Any:
    """Of a table that another program wrote: no NaN, and no object that JSON does not have."""
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)[:2000]


def _sort(handler: _Handler, rest: str) -> Reply:
    request = handler.json_body()
    classes, templates = request.get("classes"), request.get("templates", "plain")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise RequestError("type at least two classes, one per line")
    name, result = handler.server.engine.sort(classes, str(templates))
    rows = [{"name": text, "count": count} for text, count in zip(result.classes, result.counts, strict=True)]
    return _json({"sorted": name, "classes": rows})


def _sorted(handler: _Handler, rest: str) -> Reply:
    """The images of one class, the doubtful ones first; as CSV those of all."""
    engine, (name, dot, ending) = handler.server.engine, rest.partition(".")

    result = engine.sorted.get(name)
    if result is None:
        raise Refused(HTTPStatus.NOT_FOUND, "these classes were sorted some time ago; sort again")
    if dot and ending == "csv":
        text = "".join(_csv_lines(engine, result))
        download = ("Content-Disposition", 'attachment; filename="classes.csv"')
        return Reply(text.encode(), "text/csv; charset=utf-8", headers=(("Cache-Control", "no-store"), download))
    number, offset = handler.number("class"), max(0, handler.number("offset"))
    if not 0 <= number < len(result.classes):
        raise RequestError("there is no such class")
    rows = result.rows_of(number)[offset : offset + 60]
    hits = [
        engine.hit(int(result.ids[row]), float(result.probability[row]))._asdict()
        | {"second": result.classes[int(result.second[row])]}
        for row in rows
    ]
    return _json({"hits": hits})


def _csv_lines(engine: Engine, result: Any) -> Iterator[str]:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["id", "key", "shard", "class", "probability", "second"])
    for row in range(len(result.ids)):
        index, assigned = int(result.ids[row]), result.classes[int(result.assigned[row])]
        second = result.classes[int(result.second[row])]
        probability = f"{result.probability[row]:.4f}"
        writer.writerow([index, engine.store.key(index), engine.shard_of(index), assigned, probability, second])
        if row % 1000 == 999:
            yield file.getvalue()
            file.seek(0)
            file.truncate()
    yield file.getvalue()


GET: dict[str, Callable[[_Handler, str], Reply]] = {
    "/api/info": _info,
    "/api/duplicates": _duplicates,
    "/api/suspects": _suspects,
    "/api/sorted/": _sorted,
    "/image/": _image,
}
POST: dict[str, Callable[[_Handler, str], Reply]] = {
    "/api/search": _search,
    "/api/search-image": _search_image,
    "/api/sort": _sort,
}
