"""The page's server: what it answers, what it refuses, and that it stays up."""

import contextlib
import csv
import io
import random
import select
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image
from search_sets import FIRST, SCRIPT, SECOND, embed, image_of, request, serving, write_hostile_shards

from leanclip.search import server as server_module
from leanclip.search.engine import open_engine
from leanclip.search.server import MAX_UPLOAD_BYTES, SearchServer
from refusal import assert_refused

SECRET = "the words of another file"


@pytest.fixture(scope="module")
def server(small_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "secret.txt").write_text(SECRET)
    out = embed(small_run, write_hostile_shards(folder / "shards"), folder / "out")
    engine = open_engine(str(out), device="cpu")
    suspects = [{"id": 3, "key": "k03", "shard": FIRST, "caption": SCRIPT, "score": float("nan"), "rank": 1}]
    with serving(engine, suspects=suspects) as running:
        yield running


def test_the_page_and_what_it_asks_for(server):
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
        status, headers, content = request(server, "GET", path)
        assert status == 200 and headers.get_content_type() == kind and len(content) > 1000
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert b"http://" not in content and b"https://" not in content  # nothing from elsewhere
    _, _, info = request(server, "GET", "/api/info")
    assert (info["samples"], info["images"], info["approximate"]) == (40, 39, False)
    assert [shard["name"] for shard in info["shards"]] == [FIRST, SECOND]
    status, headers, content = request(server, "GET", "/image/3")
    assert status == 200 and headers["Content-Type"] == "image/jpeg"
    assert Image.open(io.BytesIO(content)).size == (32, 32)
    assert request(server, "HEAD", "/image/3")[2] == b""
    _, _, answer = request(server, "GET", "/api/suspects")
    assert answer["total"] == 1 and answer["rows"][0]["caption"] == SCRIPT and answer["rows"][0]["score"] == "nan"


def test_the_browser_keeps_no_image_for_the_next_server(server):
    token = request(server, "GET", "/api/info")[2]["token"]
    with serving(server.engine) as later:
        assert request(later, "GET", "/api/info")[2]["token"] != token
        status, headers, answer = request(later, "GET", f"/image/3?token={token}")
        assert status == 410 and "reload" in answer["error"] and headers["Cache-Control"] == "no-store"
    assert "max-age" in request(server, "GET", f"/image/3?token={token}")[1]["Cache-Control"]
    assert request(server, "GET", "/image/3")[1]["Cache-Control"] == "no-store"


def test_search_by_sentence_image_and_sample(server):
    _, _, answer = request(server, "POST", "/api/search", {"text": "square number 3", "count": 40})
    assert len(answer["hits"]) == 39
    assert {hit["id"]: hit["caption"] for hit in answer["hits"]}[3] == SCRIPT
    _, _, answer = request(server, "POST", "/api/search", {"id": 7, "count": 1, "shard": 1})
    assert answer["hits"][0]["key"] == "k33" and answer["hits"][0]["shard"] == SECOND
    path = "/api/search-image?count=2&shard="
    _, _, answer = request(server, "POST", path, image_of(7), Content_Type="image/png")
    assert {hit["id"] for hit in answer["hits"]} == {7, 33}


def test_classes_and_their_csv(server):
    classes = ["square number 1", 'with "quotes", and commas']
    _, _, answer = request(server, "POST", "/api/sort", {"classes": classes, "templates": "plain"})
    assert [entry["name"] for entry in answer["classes"]] == classes
    name, first = answer["sorted"], answer["classes"][0]["count"]
    _, _, shown = request(server, "GET", f"/api/sorted/{name}?class=0")
    assert len(shown["hits"]) == first and shown["hits"] == sorted(shown["hits"], key=lambda hit: hit["score"])
    _, headers, content = request(server, "GET", f"/api/sorted/{name}.csv")
    assert "attachment" in headers["Content-Disposition"]
    rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    assert len(rows) == 39 and {row["class"] for row in rows} <= set(classes)
    assert any("onload" in row["key"] for row in rows)
    assert request(server, "GET", f"/api/sorted/{name}?class=2")[0] == 400
    assert request(server, "GET", "/api/sorted/0123")[0] == 404


def test_near_duplicates_are_found_in_the_background(server):
    while not (answer := request(server, "GET", "/api/duplicates?threshold=0.9999")[2])["finished"]:
        pass
    assert [7, 33] in [[hit["id"] for hit in pair] for pair in answer["pairs"]]
    assert request(server, "GET", "/api/duplicates?threshold=0.1")[0] == 400
    assert request(server, "GET", "/api/duplicates?threshold=x")[0] == 400


def test_a_broken_image_says_where_it_was(server):
    status, _, answer = request(server, "GET", "/image/5")
    assert status == 400 and f"shards/{FIRST}" in answer["error"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:PORT", "Origin": "http://localhost:PORT"}, 200),
        ({"Host": "127.0.0.1:PORT", "Sec_Fetch_Site": "same-origin"}, 200),
        ({"Host": "[::1]:PORT"}, 200),
        ({"Host": "evil.example:PORT"}, 421),
        ({"Host": "127.0.0.1.evil.example:PORT"}, 421),
        ({"Host": "localhost:PORT@evil.example"}, 421),
        ({"Host": "localhost:1"}, 421),
        ({"Host": "192.168.1.7:PORT"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://127.0.0.1:PORT"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "navigate"}, 403),
    ],
)
def test_hosts_and_origins(server, headers, status):
    headers = {name: value.replace("PORT", str(server.port)) for name, value in headers.items()}
    assert request(server, "GET", "/api/info", **headers)[0] == status
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert request(server, "GET", "/", **link)[0] == 200  # a link to the page may be followed


def test_a_server_for_others_takes_addresses_and_its_name(server):
    with SearchServer(server.engine, "0.0.0.0", 0) as other:
        for host in ("192.168.1.7", "[fe80::1]", "localhost", socket.gethostname()):
            assert other.allows_host(f"{host}:{other.port}")
        assert not other.allows_host(f"evil.example:{other.port}")
        assert other.url == f"http://127.0.0.1:{other.port}/"


def test_uploads_are_bounded(server):
    status, _, answer = request(
        server, "POST", "/api/search-image", bytes(MAX_UPLOAD_BYTES + 1), Content_Type="image/png"
    )
    assert status == 413 and "at most 32 MiB are read" in answer["error"]
    chunk = lambda kind, data: len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")  # noqa: E731
    header = (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
    status, _, answer = request(server, "POST", "/api/search-image", bomb, Content_Type="image/png")
    assert status == 400 and "60000" in answer["error"]
    status, _, answer = request(server, "POST", "/api/search", {"text": "x" * 3000})
    assert status == 400 and "2,000" in answer["error"]
    assert request(server, "POST", "/api/search", b'{"text": "a cat"}', Content_Type="text/plain")[0] == 415
    assert request(server, "POST", "/api/search", b"[" * 100_000, Content_Type="application/json")[0] == 400


PATHS = (
    "/", "/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fsecret.txt", "/image/../../secret.txt",
    "/image/..%5c..%5csecret.txt", "/image//etc/passwd", "/image/-1", "/image/40", "/image/1e3", "/image/0x1",
    "/image/" + "9" * 400, "/image/\u00bd", "/page.js/../store.py", "/store.py", "/page.html", "//evil.example/",
    "http://evil.example/", "file:///etc/passwd", "/api/sorted/../info", "/api/sorted/.csv", "/api/sorted/%00",
    "/api/duplicates?threshold=nan", "/api/duplicates?offset=-5", "/api/suspects?offset=" + "9" * 30,
    "/api/info?" + "a=1&" * 99, "/" + "a" * 70_000,
    "/api/search", "/api/search-image?count=999999", "/api/sort", "/\x00", "/\xff\xfe", "//[::1", "*", "",
)  # fmt: skip
HOSTS = ("127.0.0.1:PORT", "evil.example", "127.0.0.1:PORT, evil.example", "localhost:99999999", "[::", "\xff", "")
BODIES = (
    b"", b"{}", b'{"text": 5}', b'{"id": true}', b'{"id": 1e400}', b'{"id": -1}', b'{"text": "\\ud800"}', b"\xff\xfe",
    b'{"text": "a", "count": -1}', b'{"text": "a", "shard": 99}', b'{"classes": [1, 2]}', b'{"classes": ["a", "b"]}',
    b"[" * 5000, b"null", b'{"text": "' + b"x" * 1999 + b'"}', bytes(5000),
    b'{"classes": ["a", "b"], "templates": "../../x"}', b"\x1f\x8b\x08" + bytes(40),
)  # fmt: skip
KINDS = (
    "application/json",
    "image/png",
    "application/octet-stream",
    "text/plain",
    "multipart/form-data; boundary=x",
    "",
)


def hostile(rng, port):
    body = rng.choice(BODIES)
    length = rng.choice([str(len(body)), str(len(body)), "-1", "9" * 30, "1e3", str(len(body) + 9), ""])
    lines = [
        f"{rng.choice(['GET', 'POST', 'POST', 'PUT', 'CONNECT', 'get', 'X' * 300])} {rng.choice(PATHS)} "
        + rng.choice(["HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/x", "", "HTTP/1.1 extra"]),
        f"Host: {rng.choice([HOSTS[0], HOSTS[0], *HOSTS])}".replace("PORT", str(port)),
        f"Content-Type: {rng.choice(KINDS)}",
        f"Content-Length: {length}",
        rng.choice(["X: y", "Origin: http://evil.example", "Transfer-Encoding: chunked", "Expect: 100-continue",
                    "Range: bytes=0-", "Content-Encoding: gzip", "\xff: \xff", "no colon", "A: " + "b" * 70_000]),
    ]  # fmt: skip
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


def test_a_thousand_hostile_requests_leave_it_up_and_learn_nothing(server, capfd):
    rng = random.Random(0)
    answers = []
    for number in range(1000):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            answers.append(
                _answer_to(connection, rng.randbytes(200) if number % 50 == 0 else hostile(rng, server.port))
            )
    statuses = [answer[9:12].decode("latin-1") for answer in answers]
    assert {"200", "400", "403", "404", "421"} <= set(statuses)
    assert "500" not in statuses
    for answer in answers:
        assert SECRET.encode() not in answer and b"root:" not in answer and b"Traceback" not in answer
        assert b"import" not in answer.partition(b"\r\n\r\n")[2] or b'"use strict"' in answer
    assert capfd.readouterr().err == ""
    assert request(server, "GET", "/api/info")[0] == 200
    assert len(request(server, "POST", "/api/search", {"text": "a square"})[2]["hits"]) == 10


def _answer_to(connection, content):
    parts = []
    try:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            parts.append(part)
    except OSError:
        pass  # closed before all was sent
    return b"".join(parts)


def test_a_failure_in_an_answer_tells_the_client_nothing(server, monkeypatch, capfd):
    def fail(handler, rest):
        raise RuntimeError(SECRET)

    monkeypatch.setitem(server_module.GET, "/api/info", fail)
    status, _, answer = request(server, "GET", "/api/info")
    assert status == 500 and SECRET not in str(answer)
    assert SECRET in capfd.readouterr().err


def test_fifty_clients_at_once(server):
    def client(number):
        found = [
            request(server, "POST", "/api/search", {"text": f"square number {number}", "count": 5}),
            request(server, "POST", "/api/search-image?count=3", image_of(number), Content_Type="image/png"),
            request(server, "GET", f"/image/{number % 5}"),
        ]
        assert found[1][2]["hits"][0]["score"] > 0.99 or number >= 40 or number == 5
        return [status for status, _, _ in found]

    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(client, range(50))) == [[200, 200, 200]] * 50


def test_idle_connections_do_not_block_others(server):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    try:
        assert request(server, "GET", "/api/info")[0] == 200
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    ("head", "limit"),
    [
        ("Host: 127.0.0.1:{}\r\nContent-Type: image/png\r\nContent-Length: 90\r\n\r\n", "BODY_SECONDS"),
        ("X: ", "SECONDS"),
    ],
    ids=["body", "header"],
)
def test_a_request_that_arrives_byte_by_byte_is_ended(server, monkeypatch, head, limit):
    """Each byte comes in time; all together do not. A slower machine only makes them later."""
    monkeypatch.setattr(server_module, limit, 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"POST /api/search-image HTTP/1.1\r\n{head.format(server.port)}".encode())
        sent, answer = 0, b""
        with contextlib.suppress(ConnectionError):
            while sent < 90 and not select.select([connection], [], [], 0.05)[0]:
                sent += connection.send(b"x")
            while part := connection.recv(1 << 16):
                answer += part
    assert sent < 90
    assert answer == b"" if limit == "SECONDS" else b" 408 " in answer and b"within 0.3 seconds" in answer


def test_a_port_that_is_taken_is_refused(server, capsys):
    command = ("search", server.engine.store.directory, "--device", "cpu", "--port", server.port)
    assert_refused("search.cannot_serve", command, capsys)
    assert_refused("config.bad_value", [*command[:-1], 99999], capsys)
