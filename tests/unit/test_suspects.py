"""Suspects: which pairs are listed, the table, the page, and where they are found."""

import csv
import json
import resource
import shutil
import sys

import numpy as np
import pytest
import torch
from checkpoint_runs import VALUES, train
from shard_files import picture, sound, write_shard

from browser import inspect_page, needs_browser
from leanclip.checkpointing.storage import StoredTensors, write_tensors
from leanclip.data import DataConfig, open_validation
from leanclip.data.exclusion.listed import listed_samples
from leanclip.data.shards import Shards
from leanclip.suspects import scores as scores_module
from leanclip.suspects.find import Search, find_suspects
from leanclip.suspects.scores import Scores, judge
from leanclip.suspects.table import worst_first
from refusal import assert_refused, exit_code, refuses

HOSTILE = (
    "<script>alert('caption')</script>",
    "</article><img src=x onerror=\"console.error('caption')\">",
    '=1+1, "quotes"\n{{ name }} \ud800\u202e',
)


def tables(samples: int, wrong: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores as two normals give them, visits, sums of the scores of wrong pairs, and which pairs are wrong."""
    draw = torch.Generator().manual_seed(5)
    is_wrong = torch.rand(samples, generator=draw) < wrong
    score = torch.where(is_wrong, 1.8, -0.4) + 0.4 * torch.randn(samples, generator=draw)
    return score, torch.full((samples,), 3.0), torch.tensor([1.8 * 500, 500.0]), is_wrong


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with learned weights on two shards, some of whose captions are hostile."""
    folder = tmp_path_factory.mktemp("suspects")
    (folder / "data").mkdir()
    write_shard(folder / "data/0.tar", sound(30))
    hostile = {}
    for number, caption in enumerate(HOSTILE, 30):
        hostile[f"{number:05d}.jpg"] = picture(number)
        hostile[f"{number:05d}.json"] = json.dumps({"captions": caption}).encode()
    write_shard(folder / "data/1.tar", hostile | sound(7, start=33))
    settings = {"train_data": folder / "data", "pair_weights": "learned", "loss": "infonce", "max_steps": 6}
    assert train(folder, **settings) == 0
    assert train(folder, **settings | {"pair_weights": "off", "name": "plain"}) == 0
    return folder


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("wrong", [0.05, 0.2])
def test_wrong_pairs_are_ranked_first_and_judged_by_the_estimated_share(wrong):
    *table, is_wrong = tables(20_000, wrong)
    scores = judge(*table)
    assert abs(scores.share - wrong) < 0.02
    ids = worst_first(scores, least=10)
    found = is_wrong.numpy()[ids]
    assert abs(len(ids) - is_wrong.sum()) < 0.1 * is_wrong.sum() and found.mean() > 0.9
    assert (np.diff(scores.score[ids]) <= 0).all()
    assert abs(scores.probability.mean() - wrong) < 0.02


def test_clean_data_have_no_probable_suspects_but_an_order():
    scores = judge(*tables(20_000, 0.0)[:3])
    assert scores.share == 0 and scores.probability.max() == 0
    assert len(worst_first(scores, least=100)) == 100 and len(worst_first(scores, least=100, rows=7)) == 7


def test_a_model_that_cannot_tell_gives_no_pair_a_probability():
    """All scores are like those of wrong pairs: the share would be 100%."""
    score = torch.randn(20_000, generator=torch.Generator().manual_seed(5))
    scores = judge(score, torch.full((20_000,), 3.0), torch.tensor([0.0, 500.0]))
    assert scores.share > 0.9 and not scores.can_tell and scores.probability.max() == 0
    assert judge(*tables(20_000, 0.0)[:3]).can_tell and judge(*tables(20_000, 0.2)[:3]).can_tell


def test_pairs_without_a_score_are_not_listed():
    scored = np.array([True, False, True, True])
    scores = Scores(np.array([0.5, 9.0, 2.0, 2.0], np.float32), np.zeros(4, np.float32), scored, 0.0, True)
    assert worst_first(scores, least=9).tolist() == [2, 3, 0]


def test_the_table_of_a_run_is_read_without_an_image(run, monkeypatch):
    monkeypatch.setattr(Shards, "image_bytes", lambda *_: pytest.fail("an image was read"))
    found = find_suspects(Search(run=run / "logs/run", output=run / "table.csv", shown=0, rows=12))
    assert found.from_table and found.page is None and found.scored == found.samples == 40
    rows = rows_of(run / "table.csv")
    assert list(rows[0]) == ["rank", "id", "key", "shard", "caption", "score", "probability", "numbers"]
    assert [int(row["rank"]) for row in rows] == list(range(1, 13))
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    stored = StoredTensors.open(run / "logs/run/checkpoints/last/state").read(["loss.state.score"])
    order = stored["loss.state.score"].argsort(descending=True)[:12].tolist()
    assert [int(row["id"]) for row in rows] == order
    assert all(row["key"] == f"{int(row['id']):05d}" for row in rows)
    assert all(row["shard"].endswith("0.tar" if int(row["id"]) < 30 else "1.tar") for row in rows)


def test_parquet_holds_the_same_rows(run):
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("same.csv", "same.parquet"):
        find_suspects(Search(run=run / "logs/run", output=run / name, shown=0))
    columns = parquet.read_table(run / "same.parquet").to_pydict()
    expected = rows_of(run / "same.csv")
    assert len(expected) == 40  # few look wrong, and the data hold fewer than a table lists at least
    for name in ("id", "key", "shard", "caption"):
        assert [str(value) for value in columns[name]] == [row[name] for row in expected]


def test_the_command_scores_a_run_without_a_table_and_writes_a_page(run, capsys):
    assert exit_code("data", "suspects", run / "logs/plain", "--device", "cpu", "--shown", 5) in (0, None)
    out = capsys.readouterr().out  # the model has seen three epochs of noise
    assert "scored by its model" in out and "cannot tell" in out and "look wrong" not in out
    assert len(rows_of(run / "logs/plain/suspects.csv")) == 40
    page = (run / "logs/plain/suspects.html").read_text()
    assert "cannot tell" in page and page.count("<img ") == 5 and page.count("Instead:") >= 1
    shown = json.loads((run / "logs/plain/suspects.json").read_text())["pairs"]
    assert [entry["rank"] for entry in shown] == [1, 2, 3, 4, 5]


def test_a_pass_of_several_batches_does_not_warn(run, tmp_path, monkeypatch):
    """40 samples in batches of 8: their two visits are more than an epoch and a half without a call of set_epoch."""
    monkeypatch.setattr(scores_module, "BATCH", 8)
    found = find_suspects(Search(run=run / "logs/plain", output=tmp_path / "t.csv", shown=0, device="cpu"))
    assert found.scored == 40 and not found.from_table


@pytest.mark.parametrize("exchanged", [0.0, 0.5])
def test_the_model_scores_only_samples_that_the_run_trains_on(exchanged, tmp_path):
    """Samples 0 to 19 have the images of 20 to 39, so that --val-split holds out both of a pair or none."""
    (tmp_path / "data").mkdir()
    for number in range(2):
        write_shard(tmp_path / f"data/{number}.tar", sound(20))
    (tmp_path / "out.txt").write_text("id:3\nid:4\n")
    settings = {"train_data": str(tmp_path / "data"), "val_split": 0.2, "seed": 4}
    changed = {"exclude": tmp_path / "out.txt", "exchange_captions": exchanged, "max_steps": 1, "loss": "infonce"}
    assert train(tmp_path, **settings | changed) == 0
    config = DataConfig(train_data=settings["train_data"], val_split=0.2)
    held_out = open_validation(config, seed=4)[0]
    found = find_suspects(Search(run=tmp_path / "logs/run", output=tmp_path / "t.csv", shown=0, device="cpu"))
    listed = {int(row["id"]) for row in rows_of(tmp_path / "t.csv")}
    assert held_out is not None
    apart = {*held_out.ids.tolist(), *held_out.copies.tolist()}
    assert len(held_out.copies) == len(held_out.ids) and listed == set(range(40)) - apart - {3, 4}
    written = rows_of(tmp_path / "logs/run/held_out.csv")
    assert {int(row["id"]) for row in written if row["evaluated"] == "yes"} == {*held_out.ids.tolist()}
    assert {int(row["id"]) for row in written} == apart and listed_samples(
        str(tmp_path / "logs/run/held_out.csv"), Shards(settings["train_data"])
    ).ids.tolist() == sorted(apart)
    assert not found.from_table and found.rows == len(listed) == found.scored


def test_hostile_captions_are_text(run, tmp_path):
    page = tmp_path / "page.html"
    find_suspects(Search(run=run / "logs/run", output=tmp_path / "t.csv", page=page, shown=40, device="cpu"))
    text = page.read_text()
    assert "<script>alert" not in text and "<img src=x" not in text and "&lt;script&gt;alert" in text
    captions = {row["caption"] for row in rows_of(tmp_path / "t.csv")}
    assert HOSTILE[0] in captions and "second of 3" in " ".join(captions)


@needs_browser
def test_the_page_in_a_browser(run, tmp_path):
    page = tmp_path / "page.html"
    find_suspects(Search(run=run / "logs/run", output=tmp_path / "t.csv", page=page, shown=40, device="cpu"))
    for width in (1200, 380):
        state = inspect_page(page, tmp_path / "page.png", width=width)
        state.assert_whole(width, images=40)
        assert HOSTILE[0] in state.text


def test_an_image_that_cannot_be_read_is_named(run, tmp_path, monkeypatch):
    read = Shards.image_bytes
    monkeypatch.setattr(Shards, "image_bytes", lambda self, i: b"no image" if i == 2 else read(self, i))
    page = tmp_path / "page.html"
    find_suspects(Search(run=run / "logs/run", output=tmp_path / "t.csv", page=page, shown=40, device="cpu"))
    assert page.read_text().count("<img ") == 39 and 'class="absent"' in page.read_text()


def test_data_that_moved_are_one_line(run, tmp_path, capsys):
    shutil.copytree(run / "logs/run", tmp_path / "run", symlinks=True)
    shutil.copytree(run / "data", tmp_path / "data")
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace(str(run / "data"), str(tmp_path / "data")))
    (tmp_path / "data/1.tar").rename(tmp_path / "1.tar")
    assert_refused("data.missing_shard", ["data", "suspects", tmp_path / "run", "--shown", 0], capsys)
    (tmp_path / "1.tar").rename(tmp_path / "data/1.tar")
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with refuses("data.not_found", str(tmp_path / "data")):
        find_suspects(Search(run=tmp_path / "run", shown=0))
    found = find_suspects(Search(run=tmp_path / "run", shown=0, train_data=str(tmp_path / "elsewhere")))
    assert found.rows == 40


def test_exchanged_captions_are_those_that_the_run_saw(tmp_path):
    settings = {"exchange_captions": 0.5, "loss": "infonce", "pair_weights": "auto", "max_steps": 2, "seed": 4}
    assert train(tmp_path, val_split=0.1, **settings) == 0
    found = find_suspects(Search(run=tmp_path / "logs/run", shown=0, output=tmp_path / "t.csv"))
    source = Shards(VALUES["train_data"])
    rows = rows_of(tmp_path / "t.csv")
    other = [row["caption"] != " | ".join(source.captions(int(row["id"]))) for row in rows]
    assert found.rows == len(rows) == 40 and 0.3 < np.mean(other) < 0.7


def test_scores_by_caption_are_judged_each():
    score, scored, null, is_wrong = tables(20_000, 0.05)
    scored[7], scored[8] = 1, 0
    scores = judge(score.view(4000, 5), scored.view(4000, 5), null)
    whole = judge(score, scored, null)
    assert scores.captions == 5 and abs(scores.share - 0.05) < 0.02 and scores.share == whole.share
    assert whole.scored.tolist()[6:9] == [True, True, False] and scores.scored.tolist()[6:9] == [True, False, False]
    found = is_wrong.numpy()[worst_first(scores, least=10)]
    assert found.mean() > 0.9 and abs(len(found) - is_wrong.sum()) < 0.1 * is_wrong.sum()


@pytest.mark.parametrize("captions", [2, 3])
def test_a_pass_of_the_model_scores_each_caption(captions, tmp_path, capsys):
    """With two scores the captions 0 and 2 share one."""
    files = {f"{n:05d}.jpg": picture(n) for n in range(20)}
    texts = {n: [f"caption {i} of {n}" for i in range(1 + n % 3)] for n in range(20)}
    files |= {f"{n:05d}.json": json.dumps({"captions": texts[n]}).encode() for n in range(20)}
    settings = {"train_data": write_shard(tmp_path / "0.tar", files), "captions_per_sample": captions, "max_steps": 1}
    assert train(tmp_path, **settings) == 0
    expected = {(n, i) for n in range(20) for i in range(min(captions, 1 + n % 3))}
    assert exit_code("data", "suspects", tmp_path / "logs/run", "--device", "cpu", "--shown", 5) in (0, None)
    assert f"{len(expected)} captions of 20 samples were scored by its model" in capsys.readouterr().out
    rows = rows_of(tmp_path / "logs/run/suspects.csv")
    assert {(int(row["id"]), int(row["numbers"].split()[0])) for row in rows} == expected and len(rows) == len(
        expected
    )
    for row in rows:
        numbers = map(int, row["numbers"].split())
        assert row["caption"] == " | ".join(texts[int(row["id"])][number] for number in numbers)
    assert sum(" | " in row["caption"] for row in rows) == (6 if captions == 2 else 0)


def test_mistakes_are_refused(run, tmp_path, monkeypatch):
    with refuses("suspects.no_run", str(tmp_path)):
        find_suspects(Search(run=tmp_path))
    with refuses("suspects.bad_output", "t.txt"):
        find_suspects(Search(run=run / "logs/run", output=tmp_path / "t.txt"))
    with refuses("suspects.cannot_write", "missing"):
        find_suspects(Search(run=run / "logs/run", output=tmp_path / "missing/t.csv"))
    with refuses("suspects.other_data", "--train-data"):
        find_suspects(Search(run=run / "logs/run", shown=0, train_data="synthetic:7", output=tmp_path / "t.csv"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses("suspects.no_pyarrow", ".csv"):
        find_suspects(Search(run=run / "logs/run", output=tmp_path / "t.parquet"))


@pytest.mark.parametrize("samples", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_many_samples(samples, tmp_path):
    """Of 10 million, a tenth of them wrong, the table takes less than 4 GiB."""
    settings = {"train_data": f"synthetic:{samples}", "pair_weights": "auto", "loss": "infonce", "max_steps": 1}
    assert train(tmp_path, **settings) == 0
    checkpoint = tmp_path / "logs/run/checkpoints/last"
    tensors = StoredTensors.open(checkpoint / "state").read()
    score, scored, null, _ = tables(samples, 0.1)
    tensors |= {"loss.state.score": score, "loss.state.scored": scored, "loss.state.null": null}
    shutil.rmtree(checkpoint / "state")
    write_tensors(checkpoint / "state", tensors, None)
    del tensors
    found = find_suspects(Search(run=tmp_path / "logs/run", shown=0))
    assert found.scored == samples and abs(found.share - 0.1) < 0.01 and abs(found.rows / samples - 0.1) < 0.01
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20  # KiB
