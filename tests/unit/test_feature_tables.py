"""Features of locked towers, computed once: the same training as with towers that run in every step."""

import gc
import io
import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_runs import job_of
from checkpoint_runs import train as train_any
from shard_files import picture, sound, write_shard

import leanclip
from leanclip.data import BrokenSample
from leanclip.data.feature_table import FeatureTable, copy_to_gpu
from leanclip.data.order import caption_draws
from leanclip.data.source import pick
from leanclip.evaluation import EvaluationSettings, embed
from leanclip.features.locked_towers import count_captions
from run_records import losses as losses_of_run

NAMES = ("uncached", "cached", "fewer")
WEIGHTS = []


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", autouse=True)
def weights(tmp_path_factory):
    """A run to start from: a locked tower without weights is refused."""
    folder = tmp_path_factory.mktemp("weights")
    assert train_any(folder, max_steps=1) == 0
    WEIGHTS[:] = [folder / "logs/run"]


def train(folder, **options):
    return train_any(folder, **{"pretrained": WEIGHTS[0], "tau": 0.05} | options)


def losses(folder):
    return losses_of_run(folder / "logs/run")


def shard(folder, *, broken=False):
    files = sound(48)
    if broken:
        files["00007.jpg"] = b"not an image"
        files["00009.json"] = b"{}"
    return write_shard(folder / "data.tar", files)


@pytest.mark.parametrize("lock", [{"lock_image": True}, {"lock_text": True}, {"lock_image": True, "lock_text": True}])
@pytest.mark.parametrize("broken", [False, True])
def test_cached_equals_uncached_while_there_is_a_view_for_every_epoch(tmp_path, lock, broken):
    data = shard(tmp_path, broken=broken)
    results = []
    for name, views in zip(NAMES, ({}, {"cache_locked": 3}, {"cache_locked": 1}), strict=True):
        folder = tmp_path / name
        folder.mkdir()
        options = lock | views | {"train_data": data, "global_batch_size": 16, "max_broken": 0.5, "max_steps": 9}
        options |= {"caption_weights_key": "weights"} if broken else {}
        assert train(folder, **options) == 0
        results.append(losses(folder))
    uncached, cached, fewer = map(np.array, results)
    assert len(uncached) == len(cached) == 9
    np.testing.assert_allclose(cached, uncached, rtol=1e-3)
    if "lock_image" in lock:
        np.testing.assert_allclose(fewer[:3], uncached[:3], rtol=1e-3)
        assert np.abs(fewer[3:] - uncached[3:]).max() > 3 * np.abs(cached - uncached).max()
    out = [json.loads((tmp_path / name / "logs/run/metrics.jsonl").read_text().splitlines()[-1]) for name in NAMES]
    assert [line.get("broken_image") for line in out] == [out[0].get("broken_image")] * 3


def test_a_second_run_reads_the_features_and_other_weights_get_their_own(tmp_path, capsys):
    data = shard(tmp_path)
    options = {"train_data": data, "global_batch_size": 16, "lock_text": True, "cache_locked": 1, "max_steps": 3}
    assert train(tmp_path, **options) == 0
    first = capsys.readouterr().out
    assert re.search(r"features of the text tower, training data: computed in \d+ s, 64 rows of 16", first)
    assert train(tmp_path, **options, overwrite=True, seed=5) == 0
    assert "features of the text tower, training data: read from the cache" in capsys.readouterr().out
    other = {"train_data": data, "global_batch_size": 16, "max_steps": 3, "name": "other"}
    assert train_any(tmp_path, **other) == 0
    assert train(tmp_path, **options, overwrite=True, pretrained=tmp_path / "logs/other") == 0
    assert "features of the text tower, training data: computed in" in capsys.readouterr().out
    assert len(list((tmp_path / "cache/features").iterdir())) == 2
    write_shard(data, sound(48, start=1))
    assert train(tmp_path, **options, overwrite=True) == 0
    assert "features of the text tower, training data: computed in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "side"),
    [
        ({"caption_key": "other"}, "text"),
        ({"caption_weights_key": "weights"}, "text"),
        ({"image_mean": [0.1, 0.2, 0.3]}, "image"),
        ({"force_quick_gelu": True}, "image"),
        ({"force_quick_gelu": True}, "text"),
    ],
)
def test_features_of_other_captions_or_another_model_are_not_read(tmp_path, capsys, change, side):
    files = {}
    for number in range(24):
        files[f"{number}.jpg"] = picture(number)
        files[f"{number}.json"] = json.dumps({"captions": ["one"], "other": ["two"], "weights": [1.0]}).encode()
    model = leanclip.load(WEIGHTS[0])[0]
    torch.save(model.clip.state_dict(), tmp_path / "weights.pt")
    data = str(write_shard(tmp_path / "data.tar", files))
    options = {"train_data": data, "pretrained": str(tmp_path / "weights.pt"), "lock_image": True, "lock_text": True,
               "cache_locked": 1, "caption_key": "captions"}  # fmt: skip
    tables = []
    for changes in ({}, {}, change):
        job_of(tmp_path, **options | changes)
        tables.append({path.name for path in (tmp_path / "cache/features").iterdir()})
    assert tables[0] == tables[1] and [name[: len(side)] for name in tables[2] - tables[1]].count(side) == 1


def test_features_of_a_table_belong_to_its_images(tmp_path):
    """Two folders with the same table of other images."""
    rows = [f"{index}.jpg,caption {index}" for index in range(24)]
    for start, name in ((0, "one"), (100, "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.csv").write_text("\n".join(["filepath,title", *rows]))
        for index in range(24):
            (tmp_path / name / f"{index}.jpg").write_bytes(picture(start + index))
    for name, tables in (("one", 1), ("two", 2), ("one", 2)):
        options = {"train_data": str(tmp_path / name / "table.csv"), "pretrained": str(WEIGHTS[0])}
        job_of(tmp_path, **options, lock_image=True, cache_locked=1)
        assert len(list((tmp_path / "cache/features").iterdir())) == tables


def test_runs_in_one_process_leave_nothing_behind(tmp_path):
    """No table, of which one may lie on a GPU, and no state that changes the next run."""
    options = {"train_data": shard(tmp_path), "global_batch_size": 16, "lock_image": True, "lock_text": True,
               "cache_locked": 2, "max_steps": 5, "overwrite": True}  # fmt: skip
    results = []
    for seed in (0, 1, 0):
        assert train(tmp_path, **options, seed=seed) == 0
        results.append(losses(tmp_path))
        gc.collect()
        assert not [table for table in gc.get_objects() if type(table) is FeatureTable]
    assert results[0] == results[2] != results[1]


def test_two_runs_that_begin_together_fill_one_table(tmp_path, monkeypatch):
    """The other run makes the table while this one counts captions; this one must not empty it again."""
    options = {"train_data": shard(tmp_path), "global_batch_size": 16, "lock_text": True, "cache_locked": 1}
    assert train(tmp_path, **options, max_steps=3) == 0
    expected = losses(tmp_path)
    (directory,) = (tmp_path / "cache/features").iterdir()
    (tmp_path / "other").mkdir()
    directory.rename(tmp_path / "other" / directory.name)

    def counted(source):
        (tmp_path / "other" / directory.name).rename(directory)
        return count_captions(source)

    monkeypatch.setattr("leanclip.features.locked_towers.count_captions", counted)
    monkeypatch.setattr(FeatureTable, "write", lambda *_: pytest.fail("the other run's rows are there"))
    assert train(tmp_path, **options, max_steps=3, overwrite=True) == 0
    assert losses(tmp_path) == expected
    assert [path.name for path in (tmp_path / "cache/features").iterdir()] == [directory.name]


@pytest.mark.parametrize("option", [{"val_split": 0.25}, {"exclude": "keys.txt"}])
def test_held_out_and_excluded_samples_share_the_table(tmp_path, capsys, option):
    (tmp_path / "keys.txt").write_text("00003\n")
    options = {"train_data": shard(tmp_path), "global_batch_size": 16, "lock_text": True, "cache_locked": 1}
    option = {"exclude": tmp_path / "keys.txt"} if "exclude" in option else option
    for number, changed in enumerate((option | {"seed": 1}, {}, option | {"seed": 2})):
        assert train(tmp_path, **options, **changed, max_steps=2, overwrite=True) == 0
        assert ("training data: computed" in capsys.readouterr().out) == (number == 0)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_damaged_table_is_computed_again(tmp_path, capsys):
    options = {"train_data": shard(tmp_path), "global_batch_size": 16, "lock_text": True, "cache_locked": 1}
    assert train(tmp_path, **options, max_steps=3) == 0
    expected = losses(tmp_path)
    (directory,) = (tmp_path / "cache/features").iterdir()
    first, done = (np.load(directory / f"{name}.npy") for name in ("first", "done"))
    damages = {
        "features.npy": [b"no array", b"PK\3\4" + bytes(99)],
        "table.json": [b"{", b"[" * 100_000],
        "first.npy": [b"", npy(first[::-1]), npy(first * 2), npy(first[:-1]), npy(first * 1.0)],
        "done.npy": [npy(done + 7), npy(done[:-1]), npy(done)[:90].replace(b"}", b"(")],
    }
    for name, content in [(name, content) for name, contents in damages.items() for content in contents]:
        (directory / name).write_bytes(content)
        assert train(tmp_path, **options, max_steps=3, overwrite=True) == 0
        assert "computed in" in capsys.readouterr().out
        assert losses(tmp_path) == expected


def test_a_table_that_was_not_finished_is_continued(tmp_path, monkeypatch):
    options = {"train_data": shard(tmp_path, broken=True), "global_batch_size": 16, "lock_image": True,
               "cache_locked": 2, "max_broken": 0.5, "max_steps": 3}  # fmt: skip
    monkeypatch.setattr("leanclip.features.locked_towers.IMAGES_PER_PASS", 16)
    write, calls = FeatureTable.write, []

    def interrupted(table, ids, rows):
        calls.append(list(ids))
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(table, ids, rows)

    monkeypatch.setattr(FeatureTable, "write", interrupted)
    assert train(tmp_path, **options) == 130
    assert train(tmp_path, **options) == 0
    done = [index for ids in calls[:2] + calls[3:] for index in ids]
    assert sorted(done) == [index for index in range(48) if index != 7]  # each once
    whole = losses(tmp_path)
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "another"))
    assert train(tmp_path, **options, overwrite=True) == 0
    assert losses(tmp_path) == whole


def test_rows_that_are_left_out_are_not_drawn(tmp_path):
    table = FeatureTable.create(tmp_path / "t", np.array([0, 3, 5]), 3, {})
    table.leave_out({0: [1], 1: [1]})
    copy = pickle.loads(pickle.dumps(table))  # as worker processes get it
    draws = np.linspace(0, 0.999, 50)
    assert set(copy.drawn(np.zeros(50, np.int64), draws)) == {0, 2}
    assert set(copy.drawn(np.ones(50, np.int64), draws)) == {3}
    assert copy.first[[1, 0]].tolist() == [3, 0]
    plain = FeatureTable(tmp_path / "t")
    assert set(plain.drawn(np.zeros(50, np.int64), draws)) == {0, 1, 2}


def test_rows_of_a_table(tmp_path):
    table = FeatureTable.create(tmp_path / "t", np.array([0, 2, 2, 5]), 3, {}, weights=np.array([1, 0, 1, 0, 0]))
    rows = np.arange(15, dtype=np.float16).reshape(5, 3)
    table.write([0], rows[:2])
    assert table.missing().tolist() == [1, 2]
    table.write([2], rows[2:])
    table.mark_broken(1, "image", "no pixels")
    copy = pickle.loads(pickle.dumps(table))
    assert copy.missing().size == 0
    ids = np.full((2, 2), 2)
    np.testing.assert_array_equal(copy.views(ids, np.arange(4).reshape(2, 2)), [[2, 3], [4, 2]])
    np.testing.assert_array_equal(
        copy.drawn(ids, np.array([[0, 0.3], [0.6, 0.999]])), 2
    )  # the only one with a weight
    np.testing.assert_array_equal(copy.take(np.array([[4, 0]])), rows[[[4, 0]]])
    np.testing.assert_array_equal(copy.broken(np.array([[0, 1, 2]])), [[False, True, False]])
    with pytest.raises(BrokenSample, match="no pixels") as raised:
        copy.rows(1)
    assert raised.value.kind == "image"
    (tmp_path / "t/broken.jsonl").write_bytes(b"\xff\n[1]\n5\n" + b"[" * 100_000)
    with pytest.raises(BrokenSample, match="sample 1"):
        FeatureTable(tmp_path / "t").rows(1)
    np.testing.assert_array_equal(np.load(tmp_path / "t/features.npy"), rows)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_caption_of_a_table_is_drawn_as_one_of_the_source(tmp_path, weighted):
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 6, 200)
    first = np.concatenate([[0], counts.cumsum()])
    weights = rng.integers(0, 3, first[-1]) + np.isin(np.arange(first[-1]), first) if weighted else None
    table = FeatureTable.create(tmp_path / "t", first, 2, {}, weights)
    ids = rng.integers(0, 200, (30, 16))
    draws = caption_draws(7, 2, ids, np.zeros_like(ids))
    assert draws.min() >= 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.1
    for index, draw, row in zip(ids.ravel(), draws.ravel(), table.drawn(ids, draws).ravel(), strict=True):
        own = None if weights is None else weights[first[index] : first[index + 1]].tolist()
        assert row == first[index] + pick(int(counts[index]), own, float(draw))
    visits = ((7, 3, 0), (8, 2, 0), (7, 2, 1))
    others = [caption_draws(seed, epoch, ids, np.full_like(ids, copy)) for seed, epoch, copy in visits]
    assert all(abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 0.2 for other in others)


@pytest.mark.parametrize("locked", [{"lock_image"}, {"lock_text"}, {"lock_image", "lock_text"}])
def test_batches_of_row_numbers_become_the_same_features(tmp_path, monkeypatch, locked):
    """As on a GPU, whose memory holds the tables; chunks of batches and single ones are the same."""
    options = {"train_data": str(shard(tmp_path, broken=True)), "global_batch_size": 7, "cache_locked": 2,
               "pretrained": str(WEIGHTS[0]), "tau": 0.05, "workers": 1} | dict.fromkeys(locked, True)  # fmt: skip
    mapped, copied = (job_of(tmp_path, **options) for _ in range(2))
    expected = [mapped.pack(batch) for epoch in range(2) for batch in mapped.loader.epoch(epoch)]
    for table in copied.features:
        if isinstance(table, FeatureTable):
            table.copy_to(torch.device("cpu"))
    monkeypatch.setattr("leanclip.data.feature_table.NUMBERS_AT_ONCE", 1)
    batches = [batch for epoch in range(2) for batch in copied.loader.epoch(epoch)]
    assert len(batches) == len(expected) == 12 and sum(sum(batch.broken.values()) for batch in batches) > 1
    for batch, right in zip(batches, expected, strict=True):
        sides = {"lock_image": batch.images, "lock_text": batch.tokens}
        assert all(sides[name].shape == (7,) for name in locked)  # row numbers
        gathered = copied.pack(batch)
        assert torch.equal(gathered.images, right.images) and torch.equal(gathered.tokens, right.tokens)
        assert torch.equal(batch.sample_ids, right.sample_ids) and batch.broken == right.broken
        assert batch.examples == right.examples


def test_tables_are_copied_to_a_gpu_as_far_as_a_quarter_of_its_memory_goes(tmp_path, monkeypatch):
    tables = [FeatureTable.create(tmp_path / f"{rows}", np.arange(rows + 1), 50, {}) for rows in (10, 8, 5)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * 1599, 10**9))
    monkeypatch.setattr(FeatureTable, "copy_to", lambda table, device: copied.append(len(table.features)))
    copied = []
    copy_to_gpu([None, *tables], torch.device("cuda"))
    assert copied == [10, 5]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"cache_locked": 1}, "features.nothing_locked"),
        ({"cache_locked": 1, "lock_image": True, "lock_image_unlocked_groups": 2}, "features.nothing_locked"),
        ({"cache_locked": -1, "lock_image": True}, "config.bad_value"),
        (
            {"cache_locked": 1, "lock_image": True, "model": "leanclip-tiny", "pretrained": "emoji"},
            "model.no_features",
        ),
    ],
)
def test_what_cannot_be_cached_is_refused(tmp_path, capsys, options, code):
    if options.get("pretrained") == "emoji":  # its image tower ends in timm's classifier, which is its projection
        assert train_any(tmp_path, model="leanclip-tiny", max_steps=1, name="emoji") == 0
        options = options | {"pretrained": tmp_path / "logs/emoji"}
    assert train(tmp_path, train_data=shard(tmp_path), global_batch_size=16, **options) == 2
    assert f"[{code}]" in capsys.readouterr().err
    assert not (tmp_path / "logs/run").exists()


@pytest.mark.parametrize("held_out", [{"val_split": 0.25}, {"val_data": "val"}])
def test_evaluation_reads_features_and_gives_the_same_embeddings(tmp_path, held_out):
    if "val_data" in held_out:
        files = sound(9, start=100) | {"00103.jpg": b"no image"}
        held_out = {"val_data": str(write_shard(tmp_path / "val.tar", files))}
    options = {"train_data": str(shard(tmp_path)), "global_batch_size": 16, "lock_image": True, "lock_text": True,
               "cache_locked": 2, "pretrained": str(WEIGHTS[0]), "tau": 0.05}  # fmt: skip
    job = job_of(tmp_path, **options, **held_out)
    assert job.data.val is not None
    settings = EvaluationSettings(device=job.device)
    expected = embed(job.model, job.data.val, settings)
    with torch.no_grad():
        job.model.clip.visual.conv1.weight.zero_()  # the tower does not run
        embedded = embed(job.model, job.data.val, settings, features=job.val_features)
        autocast = replace(settings, autocast=torch.autocast("cpu", torch.bfloat16))
        rounded = embed(job.model, job.data.val, autocast, features=job.val_features)
    torch.testing.assert_close(rounded.images, embedded.images, rtol=0, atol=2e-2)
    assert embedded.ids == expected.ids and embedded.captions == expected.captions
    assert embedded.broken == expected.broken == ("val_data" in held_out)
    torch.testing.assert_close(embedded.images, expected.images, rtol=0, atol=2e-3)
    torch.testing.assert_close(embedded.texts, expected.texts, rtol=0, atol=2e-3)
    tables = [FeatureTable(path) for path in (tmp_path / "cache/features").iterdir()]
    assert sum(len(table.missing()) for table in tables) == (36 if "val_split" in held_out else 0)


@pytest.mark.parametrize("cache", [{}, {"cache_locked": 2}])
def test_exchanged_captions_are_those_of_others_and_never_of_held_out_samples(tmp_path, cache):
    data = write_shard(tmp_path / "data.tar", {n: f for n, f in sound(48).items() if not n.endswith(".json")}
                       | {f"{n:05d}.txt": f"picture number {n}".encode() for n in range(0, 48, 3)})  # fmt: skip
    options = {"train_data": str(data), "global_batch_size": 12, "lock_text": True, "pretrained": str(WEIGHTS[0]),
               "tau": 0.05, "val_split": 0.25, "exchange_captions": 0.5} | cache  # fmt: skip
    job = job_of(tmp_path, **options)
    texts = [f"picture number {number}" for number in range(48)]
    every = job.model.text_features(job.model.tokenizer(texts)) if cache else job.model.tokenizer(texts)
    owner = {}
    for batch in job.loader.epoch(0):
        for index, row in zip(batch.sample_ids.tolist(), batch.tokens, strict=True):
            owner[index] = int((every - row).abs().amax(1).argmin())
    assert job.data.val is not None
    held_out = job.data.val.ids.tolist()
    assert sorted(owner) == sorted(owner.values()) == sorted(set(range(48)) - set(held_out))
    assert sum(index != other for index, other in owner.items()) == 18


def test_no_views_run_the_towers_in_every_step(tmp_path, capsys):
    """A recipe that sets the number of views can be overridden."""
    options = {"train_data": shard(tmp_path), "global_batch_size": 16, "lock_text": True, "max_steps": 2}
    assert train(tmp_path, **options, cache_locked=0) == 0
    assert "features of" not in capsys.readouterr().out and not (tmp_path / "cache/features").exists()


def test_a_dry_run_computes_no_features_and_says_their_size(tmp_path, capsys):
    options = {"train_data": shard(tmp_path), "global_batch_size": 16, "lock_image": True, "cache_locked": 4}
    assert train(tmp_path, **options, dry_run=True) == 0
    assert f"{2 * 48 * 4 * 32 / 2**20:.1f} MiB for 4 views of each image" in capsys.readouterr().out
    assert not (tmp_path / "cache/features").exists()
