"""leanclip search: exact and approximate indexes, the table, duplicates, classes, suspects, and what is refused."""

import json
import shutil
import sys
import time

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from search_sets import FIRST, SCRIPT, SECOND, embed, image_of, write_hostile_shards

from leanclip.search.data import Shard
from leanclip.search.duplicates import PairSearch
from leanclip.search.engine import Engine, RequestError, open_engine
from leanclip.search.index import ExactIndex, LargeIndex, open_index
from leanclip.search.store import EmbeddingStore
from leanclip.search.suspects import find_suspects
from refusal import assert_refused, exit_code, refuses


@pytest.fixture(scope="module")
def embedded(small_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    return embed(small_run, write_hostile_shards(folder / "shards"), folder / "out")


@pytest.fixture(scope="module")
def engine(embedded):
    return open_engine(str(embedded), device="cpu")


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("spread", [1.0, 0.02], ids=["spread out", "almost equal"])
def test_exact_search_is_exact(spread):
    """Vectors that differ by less than float16 resolves in a product are still ordered right."""
    rng = np.random.default_rng(0)
    features = unit(rng.normal(size=64) + spread * rng.normal(size=(3000, 64))).astype(np.float16)
    usable = rng.random(3000) > 0.1
    index = ExactIndex(features, usable)
    for query in unit(rng.normal(size=64) + rng.normal(size=(20, 64))).astype(np.float32):
        scores = np.where(usable, features.astype(np.float32) @ query, -np.inf)
        for span in (None, (500, 1500)):
            allowed = np.arange(3000) if span is None else np.arange(*span)
            order = allowed[np.argsort(-scores[allowed], kind="stable")][:20]
            found = index.nearest(query, 20, span)
            np.testing.assert_allclose(found.scores, scores[order], atol=1e-6)
            assert len(set(found.ids.tolist()) & set(order.tolist())) >= 19  # equal scores may change places
            assert usable[found.ids].all()
    assert len(index.nearest(features[0], 5000).ids) == usable.sum()
    assert len(ExactIndex(features, np.zeros(3000, bool)).nearest(features[0], 5).ids) == 0


def test_the_approximate_index_is_built_once_and_finds_almost_all(embedded, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(embedded, out)
    store, said = EmbeddingStore(out), []
    exact, large = open_index(store), open_index(store, largest_exact=10, notify=said.append)
    assert "index of 39 vectors" in said[0] and f"of memory; {out}/images/index.usearch has" in said[1]
    assert isinstance(large, LargeIndex) and large.approximate and not exact.approximate
    for index in np.flatnonzero(store.usable("images")).tolist():
        query = np.asarray(store.tables["images"].features[index], np.float32)
        for span in (None, store.ids_of_shard(1)):
            first, second = (which.nearest(query, 5, span) for which in (exact, large))
            assert first.ids.tolist() == second.ids.tolist()  # forty vectors are few enough to find all
            np.testing.assert_allclose(first.scores, second.scores, atol=1e-6)
        assert 5 not in large.nearest(query, 40).ids
    written = (out / "images/index.usearch").stat().st_mtime_ns
    open_index(store, largest_exact=10, notify=said.append)
    assert (out / "images/index.usearch").stat().st_mtime_ns == written and len(said) == 2
    index = out / "images/index.usearch"
    content = index.read_bytes()
    flipped = bytearray(content)
    for position in range(0, len(flipped), 50):  # usearch itself would follow what is there, and end the process
        flipped[position] ^= 0x55
    for damaged in (b"damaged", bytes(flipped)):
        index.write_bytes(damaged)
        assert len(open_index(store, largest_exact=10).nearest(np.ones(48), 5).ids) == 5
        assert len(index.read_bytes()) == len(content) and index.read_bytes() != damaged
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with refuses("install.search", "leanclip[search]"):
        open_index(store, largest_exact=10)


def test_a_query_prints_a_table(embedded, capsys):
    assert exit_code("search", embedded, "--query", "square number 3", "--count", 4, "--device", "cpu") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ".tar" in line]
    assert len(lines) == 4
    command = ("search", embedded, "--device", "cpu", "--query", "x", "--count", 3)
    assert exit_code(*command, "--shard", SECOND) == 0
    assert capsys.readouterr().out.count(SECOND) == 3
    assert_refused("search.no_shard", [*command, "--shard", "other"], capsys)
    assert_refused("search.bad_query", [*command[:-3], " "], capsys)


def test_a_caption_in_the_table_cannot_command_the_terminal(embedded, capsys, monkeypatch):
    monkeypatch.setattr(Engine, "caption", lambda *_: "\x1b]0;title\x07one\ntwo [/red]")
    assert exit_code("search", embedded, "--query", "x", "--count", 1, "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "title\N{REPLACEMENT CHARACTER}one two [/red]" in printed


def test_a_long_table_is_whole_and_one_that_is_too_long_is_refused(small_run, tmp_path, capsys):
    embed(small_run, "synthetic:260", tmp_path / "out")
    capsys.readouterr()
    command = ("search", tmp_path / "out", "--query", "square", "--device", "cpu", "--count")
    assert exit_code(*command, 250) == 0
    assert capsys.readouterr().out.count("synthetic:260") == 250
    assert_refused("config.bad_value", [*command, 1001], capsys, "1 to 1,000")


def test_there_are_no_hits_beyond_the_limit(engine, monkeypatch):
    monkeypatch.setattr("leanclip.search.engine.MOST_HITS", 20)
    query = engine.of_sample(7)
    pages = [[hit.id for hit in engine.nearest(query, count=15, offset=offset)] for offset in (0, 15, 20, 30)]
    assert [len(ids) for ids in pages] == [15, 5, 0, 0] and len({*pages[0], *pages[1]}) == 20


def test_an_image_finds_itself_and_its_copy(engine):
    for query in (engine.of_image(image_of(7)), engine.of_sample(7), engine.of_sample(33)):
        hits = engine.nearest(query, count=2)
        assert {hit.id for hit in hits} == {7, 33} and hits[1].score > 0.99
    assert engine.nearest(engine.of_sample(7), count=1, shard=1)[0].id == 33
    assert [hit.id for hit in engine.nearest(engine.of_sample(7), count=3, offset=1)] == [
        hit.id for hit in engine.nearest(engine.of_sample(7), count=4)
    ][1:]
    with pytest.raises(RequestError, match="no vector"):
        engine.of_sample(5)
    with pytest.raises(RequestError, match="cannot be read"):
        engine.of_image(b"GIF89a")


def test_near_duplicates(engine, embedded):
    for index in (engine.index, open_index(engine.store, largest_exact=10)):
        search = PairSearch(0.9999)
        search.run(index, engine.usable)
        assert search.finished and search.done == 1
        assert [7, 33] in search.pairs.tolist() and (np.diff(search.scores) <= 0).all()
        assert 5 not in search.pairs
        features = np.asarray(engine.store.tables["images"].features, np.float32)
        all_pairs = np.argwhere(np.triu(features @ features.T >= 0.9999, 1))
        assert sorted(search.pairs.tolist()) == all_pairs.tolist()


def test_a_comparison_that_fails_says_so_and_can_be_tried_again(engine, monkeypatch):
    def fail(search, index, ids):
        raise IndexError("out of range")

    fresh = Engine(engine.store, engine.source, engine.model, engine.index)
    with monkeypatch.context() as patched:
        patched.setattr(PairSearch, "_compare_all", fail)
        search = fresh.pairs(0.9999)
        wait_for(search)
    assert search.error == "the images could not be compared (IndexError: out of range)"
    assert fresh.pairs(0.9999) is search  # reported
    again = fresh.pairs(0.9999)
    wait_for(again)
    assert again.error is None and len(again.pairs)


def wait_for(search):
    while not search.finished:
        time.sleep(0.01)


def test_two_pages_do_not_end_each_others_comparison(engine):
    fresh = Engine(engine.store, engine.source, engine.model, engine.index)
    lower = fresh.pairs(0.9)
    assert fresh.pairs(0.9999) is lower and fresh.pairs(0.9) is lower
    wait_for(lower)
    alone = PairSearch(0.9999)
    alone.run(engine.index, engine.usable)
    count = lower.count(0.9999)
    assert 0 < count == len(alone.pairs) and lower.pairs[:count].tolist() == alone.pairs.tolist()


def test_the_approximate_index_is_asked_under_the_lock(engine):
    class Whole:
        def neighbours(self, queries, count):
            assert engine._computing.locked()
            return np.full((len(queries), count), -1, np.int64)

    features = engine.store.tables["images"].features
    large = LargeIndex(features, engine.usable, Whole())  # type: ignore[arg-type]
    search = PairSearch(0.9, asking=engine._computing)
    search.run(large, engine.usable)
    assert search.finished and search.error is None
    fresh = Engine(engine.store, engine.source, engine.model, large)
    assert fresh.pairs(0.9).asking is fresh._computing


def test_images_are_sorted_into_classes(engine, monkeypatch):
    name, result = engine.sort(["square number 1", " square number 2", "", "a  dog", "a dog"], "plain")
    assert result.classes == ("square number 1", "square number 2", "a dog")
    assert sum(result.counts) == 39 and sorted(result.ids.tolist()) == [i for i in range(40) if i != 5]
    features = np.asarray(engine.store.tables["images"].features, np.float32)
    texts = np.stack([engine.of_text(text) for text in result.classes])
    scores = np.exp((features @ texts.T) / engine.model.temperature())
    scores /= scores.sum(1, keepdims=True)
    for number in range(3):
        rows = result.rows_of(number)
        ids = result.ids[rows.start : rows.stop]
        assert (scores[ids].argmax(1) == number).all()
        np.testing.assert_allclose(
            result.probability[rows.start : rows.stop], np.sort(scores[ids, number]), atol=1e-3
        )
    assert engine.sort(["square number 1", "square number 2", "a dog"], "plain")[0] == name
    assert engine.sort(["square number 1", "square number 2", "a dog"], "simple")[0] != name
    for classes, templates in ((["one"], "plain"), (["a", "b"], "other"), ([str(n) for n in range(1001)], "plain")):
        with pytest.raises(RequestError):
            engine.sort(classes, templates)
    monkeypatch.setattr(engine, "_texts", lambda texts: pytest.fail("computed"))
    with pytest.raises(RequestError, match=r"101 classes with 80 prompts each are 8,080 sentences; at most 8,000"):
        engine.sort([str(n) for n in range(101)], "openai")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_suspects_are_joined_by_shard_and_key(kind, engine, tmp_path):
    columns = {
        "key": ["k33", "k07", "absent"], "shard": [f"/elsewhere/{SECOND}", FIRST, FIRST],
        "caption": ["a", SCRIPT, ""], "score": [0.1, 0.2, 0.3], "probability": [0.9, 0.8, 0.7], "rank": [1, 2, 3],
    }  # fmt: skip
    path = tmp_path / f"suspects.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.table(columns), path)
    else:
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        path.write_text("\n".join(lines))
    rows = find_suspects(engine.store, str(path))
    assert rows is not None and [row["id"] for row in rows] == [33, 7, None]
    assert rows[1]["caption"] == SCRIPT
    assert find_suspects(engine.store, None) is None
    for content in (b"a,b\n1,2\n", b'key,shard\n"k33,0\nk07,0\n'):
        path.write_bytes(content)
        with refuses("search.bad_suspects"):
            find_suspects(engine.store, str(path))


def test_suspects_of_shards_with_the_same_name_are_told_apart(engine, tmp_path, monkeypatch):
    store = engine.store
    monkeypatch.setattr(store, "shards", [Shard("/a/0.tar", 0), Shard("/b/0.tar", 20)])
    monkeypatch.setattr(store, "keys", np.array([b"k%02d" % (number % 20) for number in range(40)]))
    table = "key,shard,id\nk03,/b/0.tar,3\nk04,/a/0.tar,4\nk05,0.tar,5\nk06,/b/0.tar,\nk07,/b/0.tar,99\n"
    (tmp_path / "suspects.csv").write_text(table)
    rows = find_suspects(store, str(tmp_path / "suspects.csv"))
    assert rows is not None and [row["id"] for row in rows] == [23, 4, None, 26, 27]


def test_what_moved_or_is_another_is_named(embedded, small_run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(embedded.parent, folder)
    facts = json.loads((folder / "out/embeddings.json").read_text())
    facts["data"]["location"] = str(folder / "shards")
    facts["shards"] = [[path.replace(str(embedded.parent), str(folder)), first] for path, first in facts["shards"]]
    (folder / "out/embeddings.json").write_text(json.dumps(facts))
    out = str(folder / "out")
    open_engine(out, device="cpu")
    (folder / "shards" / FIRST).rename(folder / "moved.tar")
    with refuses("search.data_moved", str(folder / "shards"), f"{folder / 'shards' / FIRST} is missing", "--data"):
        open_engine(out)
    (folder / "elsewhere").mkdir()
    (folder / "moved.tar").rename(folder / "elsewhere" / FIRST)
    shutil.copy(folder / "shards" / SECOND, folder / "elsewhere")
    assert open_engine(out, data=str(folder / "elsewhere"), device="cpu").caption(6) == "square number 6"
    shutil.rmtree(folder / "shards")
    with refuses("search.data_moved", str(folder / "shards")):
        open_engine(out)
    facts["model"]["digest"] = "0" * 64
    (folder / "out/embeddings.json").write_text(json.dumps(facts))
    with refuses("search.other_model", str(small_run), "step 15", "000000000000"):
        open_engine(out, data=str(folder / "elsewhere"))
    facts["model"]["place"] = str(folder / "gone")
    (folder / "out/embeddings.json").write_text(json.dumps(facts))
    with refuses("search.model_moved", str(folder / "gone"), "--model"):
        open_engine(out, data=str(folder / "elsewhere"))
    with refuses("search.no_embeddings", str(tmp_path)):
        open_engine(str(tmp_path))


def test_captions_alone_cannot_be_searched(small_run, embedded, tmp_path):
    shards = str(embedded.parent / "shards")
    assert exit_code("embed", small_run, shards, tmp_path / "out", "--device", "cpu", "--of", "captions") == 0
    with refuses("search.no_images", "--of images"):
        open_engine(str(tmp_path / "out"))
