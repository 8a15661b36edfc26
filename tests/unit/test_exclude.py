"""--exclude: which samples a file names, what an epoch visits without them, and resumed runs."""

import csv
import json
import shutil

import numpy as np
import pyarrow
import pytest
from checkpoint_runs import assert_train_refused, equal, job_of, saved_tensors, train
from pyarrow import parquet
from shard_files import picture, write_shard

from leanclip.checkpointing.storage import StoredTensors
from leanclip.config import override
from leanclip.data.datasets import _checksum
from leanclip.data.exclusion.listed import Listed, listed_samples, same_shards
from leanclip.data.order import NO_IDS, SplitVisits, WeightedVisits
from leanclip.data.shards import Shards
from leanclip.data.source import Part
from leanclip.runs import TrainConfig
from leanclip.runs.defaults import fill
from leanclip.suspects.find import Search, find_suspects
from refusal import refuses

PARTS = [Part(0, 40, 1.0), Part(40, 70, 2.5), Part(70, 100, 0.4)]


def shard(path, keys):
    files = {}
    for number, key in enumerate(keys):
        files |= {f"{key}.jpg": picture(number), f"{key}.txt": f"caption of {key}".encode()}
    return write_shard(path, files)


@pytest.fixture
def source(tmp_path):
    """Two shards; the key `twin` is in both."""
    (tmp_path / "data").mkdir()
    shard(tmp_path / "data/0.tar", ["a", "b", "twin", "7"])
    shard(tmp_path / "data/1.tar", ["c", "twin", "d"])
    return Shards(str(tmp_path / "data"))


def ids_of(visits, epoch=0):
    return visits.at(np.arange(len(visits)), seed=3, epoch=epoch)[0]


def test_an_epoch_visits_all_samples_but_those():
    excluded = np.array([0, 1, 39, 40, 55, 69, 70, 99])
    visits = WeightedVisits(PARTS, excluded)
    kept = np.setdiff1d(np.arange(100), excluded)
    for epoch in range(3):
        counts = np.bincount(ids_of(visits, epoch), minlength=100)
        assert not counts[excluded].any() and (counts[kept[kept < 40]] == 1).all()
        middle, last = counts[kept[(kept >= 40) & (kept < 70)]], counts[kept[kept >= 70]]
        assert middle.min() >= 2 and middle.sum() == round(2.5 * 27) and last.sum() == round(0.4 * 28)
    whole = WeightedVisits(PARTS)
    assert np.array_equal(ids_of(whole.without(NO_IDS)), ids_of(whole))
    assert len(whole.without(np.arange(100))) == 0
    assert np.array_equal(visits.ids(), kept) and np.array_equal(whole.ids(), np.arange(100))


def test_too_few_samples_are_left():
    config = override(TrainConfig(), {"exclude": "out.txt", "global_batch_size": 64}, "test")
    for left in (0, 3):
        with refuses("config.batch_too_large", f"the {left} training samples that --exclude out.txt leaves"):
            fill(config, samples=left)


def test_held_out_samples_stay_held_out():
    plain, visits = SplitVisits(50, 10, seed=1), SplitVisits(50, 10, seed=1)
    excluded = np.array([0, 3, 4, int(plain.held_out_ids[0])])
    visits.without(np.sort(excluded))
    assert np.array_equal(visits.held_out_ids, plain.held_out_ids)
    assert np.array_equal(np.sort(plain.ids()), np.setdiff1d(np.arange(50), plain.held_out_ids))
    assert np.array_equal(np.sort(ids_of(visits)), np.setdiff1d(np.sort(ids_of(plain)), excluded))


def test_keys_and_ids_one_per_line(source, tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(b"c\n\n  a \nid:3\n7\nnot there\nid:99\nid:x\n\xff\n")
    ids, message, _ = listed_samples(str(path), source)
    assert ids.tolist() == [0, 3, 4] and "3 of 7" in message and "4 entries" in message
    path.write_text("twin")
    assert listed_samples(str(path), source).ids.tolist() == [2, 5]


def write_table(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_names_samples_by_id_and_finds_moved_ones_by_key_and_shard(source, tmp_path, suffix):
    rows = [
        {"id": 0, "key": "a", "shard": "/old/0.tar"},
        {"id": 2, "key": "twin", "shard": "/old/0.tar"},
        {"id": 6, "key": "twin", "shard": "/old/1.tar"},  # of other data
        {"id": 0, "key": "b", "shard": "/old/9.tar"},
    ]
    ids, message, _ = listed_samples(write_table(tmp_path / f"table{suffix}", rows), source)
    assert ids.tolist() == [0, 2, 5] and "1 entries" in message and "'b'" in message


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_pairs_that_are_likely_right_are_skipped(source, tmp_path, suffix):
    rows = [{"id": index, "key": source.key(index), "probability": 0.9 - 0.2 * index} for index in range(4)]
    ids, message, _ = listed_samples(write_table(tmp_path / f"table{suffix}", rows), source)
    assert ids.tolist() == [0, 1] and "2 of 7" in message and "2 rows" in message
    ids, message, _ = listed_samples(write_table(tmp_path / f"right{suffix}", rows[2:]), source)
    assert not len(ids) and "0 of 7" in message and "2 rows" in message
    plain = [{"key": row["key"]} for row in rows]
    assert listed_samples(write_table(tmp_path / f"keys{suffix}", plain), source).ids.tolist() == [0, 1, 2, 3, 5]


@pytest.fixture
def data_sets(tmp_path):
    """Two data sets with the same names of shards and keys."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
        for number in range(2):
            shard(folder / f"{number}.tar", ["0", "1", "2"])
    return folders


def test_shards_of_the_same_name_are_told_apart_by_path(data_sets, tmp_path):
    first, second = data_sets
    both, swapped = (Shards("::".join(map(str, order))) for order in (data_sets, data_sets[::-1]))
    rows = [{"id": index, "key": both.key(index), "shard": both.file(index)} for index in (1, 11)]
    table = write_table(tmp_path / "table.csv", rows)
    assert listed_samples(table, both).ids.tolist() == [1, 11]
    assert listed_samples(table, swapped).ids.tolist() == [5, 7]  # an id and its key agree, and the shard is another
    ids, message, _ = listed_samples(table, Shards(str(second)))
    assert ids.tolist() == [5] and "1 entries" in message  # not the shard 0.tar of the second, which is in its place
    moved = [row | {"shard": row["shard"].replace(str(tmp_path), "/old")} for row in rows]
    with refuses("data.exclude_nothing"):
        listed_samples(write_table(tmp_path / "moved.csv", moved), both)
    assert listed_samples(write_table(tmp_path / "one.csv", moved[:1]), Shards(str(first))).ids.tolist() == [1]


def test_a_name_that_two_listed_shards_have_decides_nothing():
    known = ["/new/0.tar", "/new/1.tar"]
    assert same_shards(["/a/0.tar", "/b/0.tar", "/b/1.tar"], known) == {"/b/1.tar": "/new/1.tar"}
    assert same_shards(["s3://a/0.tar", "/new/1.tar"], known) == {"/new/1.tar": "/new/1.tar"}
    assert same_shards(["0.tar"], known) == {"0.tar": "/new/0.tar"}


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.txt", None, "data.not_found"),
        ("other.txt", "nothing of it", "data.exclude_nothing"),
        ("other.csv", "name,value\n1,2\n", "data.missing_column"),
        ("damaged.parquet", "no parquet", "data.unreadable"),
    ],
)
def test_mistakes_are_refused(name, content, code, source, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with refuses(code, name):
        listed_samples(str(tmp_path / name), source)


def test_tables_that_cannot_be_read_are_refused(source, tmp_path):
    for numbers in ("1.5", "²"):
        (tmp_path / "numbers.csv").write_text(f"key,numbers\na,{numbers}\n")
        with refuses("data.unreadable", "numbers.csv", numbers[:40]):
            listed_samples(str(tmp_path / "numbers.csv"), source)
    columns = pyarrow.array([b"\xff", b"a"]).view(pyarrow.string()), pyarrow.array([1], pyarrow.timestamp("ns"))
    for column in columns:
        parquet.write_table(pyarrow.table({"key": column}), tmp_path / "damaged.parquet")
        with refuses("data.unreadable", "damaged.parquet"):
            listed_samples(str(tmp_path / "damaged.parquet"), source)


def test_a_quote_that_is_never_closed_hides_no_rows(source, tmp_path):
    (tmp_path / "t.csv").write_text('key,caption\na,x\n"b,y\nc,z\n')
    with refuses("data.unreadable", "t.csv"):
        listed_samples(str(tmp_path / "t.csv"), source)


@pytest.mark.parametrize("name", ["t.csv", "t.txt"])
def test_a_byte_order_mark_is_no_part_of_a_name(name, source, tmp_path):
    (tmp_path / name).write_text("key\nd\n" if name == "t.csv" else "d\n", encoding="utf-8-sig")
    assert listed_samples(str(tmp_path / name), source).ids.tolist() == [6]


def test_a_run_without_them_keeps_ids_and_resumes_with_the_same_ones_only(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    shard(tmp_path / "data/0.tar", [f"{number:03d}" for number in range(50)])
    excluded = [3, 17, 49]
    (tmp_path / "out.txt").write_text("".join(f"{number:03d}\n" for number in excluded) + "unknown\n")
    settings = {"train_data": tmp_path / "data", "global_batch_size": 8, "max_steps": 12, "save_every": 6}
    settings |= {"loss": "infonce", "pair_weights": "learned", "exclude": tmp_path / "out.txt"}
    assert train(tmp_path, **settings) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 of 50 samples are left out; 1 entries" in said
    expected = saved_tensors(tmp_path, 12)
    scored = expected["loss.state.scored"]
    assert len(scored) == 50 and scored[excluded].eq(0).all() and scored.sum() == 12 * 8
    shutil.copytree(tmp_path / "logs/run/checkpoints/step_00000006", tmp_path / "copy")
    (tmp_path / "logs/run").rename(tmp_path / "logs/whole")
    (tmp_path / "out.txt").rename(tmp_path / "moved.txt")
    settings |= {"resume": tmp_path / "copy", "exclude": tmp_path / "moved.txt"}
    assert train(tmp_path, **settings) == 0
    equal(saved_tensors(tmp_path, 12), expected)
    (tmp_path / "other.txt").write_text("id:4")
    for wrong in ({"exclude": tmp_path / "other.txt"}, {"exclude": None}):
        assert_train_refused("data.exclude_changed", tmp_path, capsys, **settings | wrong | {"name": "again"})


def test_the_suspects_of_a_run_can_be_left_out_of_the_next(tmp_path, capsys):
    settings = {"pair_weights": "learned", "loss": "infonce", "global_batch_size": 64, "max_steps": 3}
    assert train(tmp_path, **settings) == 0
    table = tmp_path / "worst.csv"
    find_suspects(Search(run=tmp_path / "logs/run", output=table, rows=20, shown=0))
    (tmp_path / "logs/run").rename(tmp_path / "logs/first")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for likely in (0, 5):  # the model of so short a run cannot tell
        write_table(table, [row | {"probability": 0.9} for row in rows[:likely]] + rows[likely:])
        capsys.readouterr()
        assert train(tmp_path, **settings | {"exclude": table, "max_steps": 2, "name": f"without{likely}"}) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"--exclude: {likely} of " in said and f"samples are left out; {20 - likely} rows" in said
    worst = [int(row["id"]) for row in rows[:5]]
    checkpoint = tmp_path / "logs/without5/checkpoints/last/state"
    assert StoredTensors.open(checkpoint).read(["loss.state.scored"])["loss.state.scored"][worst].eq(0).all()
    resumed = {"exclude": table, "max_steps": 3, "name": "without0", "resume": "latest"}
    write_table(table, rows)
    assert train(tmp_path, **settings | resumed) == 0


@pytest.fixture
def several(tmp_path):
    """40 samples with three captions each."""
    files = {f"{number:05d}.jpg": picture(number) for number in range(40)}
    for n in range(40):
        files[f"{n:05d}.json"] = json.dumps({"captions": [f"caption {i} of {n}" for i in range(3)]}).encode()
    return str(write_shard(tmp_path / "several.tar", files))


def test_a_table_by_caption_names_captions_and_samples_without_another(several, tmp_path):
    source = Shards(several)
    rows = [
        {"id": 0, "key": "00000", "probability": 0.9, "numbers": "2"},
        {"id": 9, "key": "00000", "probability": 0.9, "numbers": "0"},  # found by its key
        {"id": 1, "key": "00001", "probability": 0.9, "numbers": "0 2"},
        {"id": 1, "key": "00001", "probability": 0.2, "numbers": "1"},
        {"id": 2, "key": "00002", "probability": 0.9, "numbers": "0 2"},
        {"id": 2, "key": "00002", "probability": 0.9, "numbers": "1"},
        {"id": 3, "key": "00003", "probability": 0.9, "numbers": ""},
        {"id": 3, "key": "00003", "probability": 0.9, "numbers": "1"},
        {"id": 4, "key": "00004", "probability": 0.9, "numbers": "3 0 1 2"},
        {"id": 5, "key": "00005", "probability": 0.9, "numbers": "3 4"},  # it has no such captions: nothing
        {"id": 6, "key": "00006", "probability": 0.9, "numbers": "0 3"},
    ]
    for suffix in (".csv", ".parquet"):
        ids, message, captions = listed_samples(write_table(tmp_path / f"table{suffix}", rows), source)
        assert ids.tolist() == [2, 3, 4] and captions == {0: {0, 2}, 1: {0, 2}, 6: {0}}
        assert "3 of 40 samples are left out, and 5 captions of 3 others; 1 rows" in message
    write_table(tmp_path / "whole.parquet", [{"id": 7, "numbers": 0}, {"id": 8, "numbers": 2}])  # not as text
    assert listed_samples(tmp_path / "whole.parquet", source).captions == {7: {0}, 8: {2}}
    for numbers in ("x", "0,1", "0.0", "9" * 5000):
        with refuses("data.unreadable", "numbers", numbers[:40]):
            listed_samples(write_table(tmp_path / "table.csv", [{"id": 4, "numbers": numbers}]), source)


def test_samples_and_captions_of_the_same_numbers_have_other_checksums():
    two = Listed(np.array([1, 2]), "", {})
    caption = Listed(np.array([], np.int64), "", {1: frozenset({2})})
    assert len({_checksum(listed, 9) for listed in (two, caption, two._replace(captions=caption.captions))}) == 3


def test_a_sample_whose_other_captions_are_never_drawn_is_left_out(tmp_path):
    captions = {"captions": ["a", "b", "c"], "weights": [1.0, 0.0, 0.0]}
    files = {"0.jpg": picture(0), "0.json": json.dumps(captions).encode(), "1.jpg": picture(1), "1.txt": b"one"}
    source = Shards(str(write_shard(tmp_path / "weighted.tar", files)), weights_key="weights")
    table = write_table(tmp_path / "table.csv", [{"id": 0, "numbers": "0"}])
    ids, _, captions = listed_samples(table, source)
    assert ids.tolist() == [0] and not captions


@pytest.mark.parametrize("exchanged", [0.0, 0.5])
@pytest.mark.parametrize("cached", [False, True])
def test_captions_that_are_left_out_are_never_drawn(cached, exchanged, several, tmp_path, monkeypatch, capsys):
    """Also where a caption came from another sample: a row is about the caption that the run saw."""
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))
    settings = {"train_data": several, "pair_weights": "learned", "captions_per_sample": 3, "loss": "infonce"}
    settings |= {"exchange_captions": exchanged, "epochs": 8, "max_steps": 16, "save_every": 8,
                 "global_batch_size": 10}  # fmt: skip
    if cached:
        assert train(tmp_path, max_steps=1, name="weights") == 0  # a locked tower without weights is refused
        settings |= {"pretrained": str(tmp_path / "logs/weights"), "lock_text": True, "cache_locked": 1, "tau": 0.05}
    assert train(tmp_path, **settings) == 0
    table = tmp_path / "worst.csv"
    found = find_suspects(Search(run=tmp_path / "logs/run", output=table, shown=0))
    assert found.by_caption and found.pairs_scored == f"{found.rows} captions of 40 samples"
    (tmp_path / "logs/run").rename(tmp_path / "logs/first")
    with table.open(newline="") as file:
        rows = [row | {"probability": 0.9} for row in csv.DictReader(file)][:30]
    captions_of = job_of(tmp_path, **settings).data.train.captions_of
    for row in rows:
        owner = int(row["id"]) if captions_of is None else captions_of[int(row["id"])]
        assert row["caption"] == f"caption {row['numbers']} of {owner}"
    write_table(table, rows)
    capsys.readouterr()
    assert train(tmp_path, **settings, exclude=table) == 0
    assert "captions of" in " ".join(capsys.readouterr().out.split())
    scored = saved_tensors(tmp_path, 16)["loss.state.scored"]
    for row in rows:
        assert scored[int(row["id"]), int(row["numbers"])] == 0
    assert scored.sum() == 16 * 10 and (scored > 0).sum() > 50
    resume = {"resume": tmp_path / "logs/run/checkpoints/step_00000008", "max_steps": 9, "name": "again"}
    assert train(tmp_path, **settings | resume, exclude=table) == 0
    write_table(table, rows[1:])
    changed = settings | resume | {"name": "other", "exclude": table}
    assert_train_refused("data.exclude_changed", tmp_path, capsys, **changed)
