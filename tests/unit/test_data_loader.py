"""The sequence of global batches is the same however it is read."""

import copy
import io
import json
import pickle
import random
import shutil
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from shard_files import picture, sound, tokenizer, write_shard

from leanclip.cli import main
from leanclip.data import Batch, BrokenCount, DataConfig, Shards, TrainingLoader, open_datasets, open_validation
from leanclip.data.batch import MAX_PICKLED_BYTES
from leanclip.data.decode import TrainingTransform
from leanclip.data.order import UniformVisits, WeightedVisits
from leanclip.distributed import Ranks
from leanclip.errors import UserError

BATCH, EPOCHS, SEED = 12, 3, 5
BROKEN_IDS = (3, 40, 41)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two shards of 40 samples in which three images do not decode."""
    directory = tmp_path_factory.mktemp("shards")
    for number in range(2):
        files = sound(40, start=40 * number)
        for index in BROKEN_IDS:
            if f"{index:05d}.jpg" in files:
                files[f"{index:05d}.jpg"] = files[f"{index:05d}.jpg"][:200]
        write_shard(directory / f"{number}.tar", files)
    return directory


def loader_of(data, form, *, share=None, workers=0):
    factors = [1.5, 1.0] if form == "weighted" else None
    source = Shards(f"{data}/0.tar::{data}/1.tar", factors=factors, weights_key="weights")
    visits = WeightedVisits(source.parts) if factors else UniformVisits(len(source))
    return TrainingLoader(
        source, visits, batch=BATCH, share=share, transform=TrainingTransform(size=(16, 16), scale=(0.3, 1.0)),
        tokenizer=tokenizer, seed=SEED, workers=workers, pin_memory=False,
        shuffle="blocks" if form == "blocks" else "all",
    )  # fmt: skip


def joined(batches):
    """The global batch from the shares of the ranks."""
    return tuple(
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("sample_ids", "tokens", "images")
    )


@pytest.mark.parametrize("form", ["plain", "weighted", "blocks"])
def test_the_batches_are_the_same_on_any_ranks_and_workers_and_after_any_stop(data, form):
    whole = loader_of(data, form)
    steps = whole.steps_per_epoch
    expected = [joined([batch]) for epoch in range(EPOCHS) for batch in whole.epoch(epoch)]
    assert len(expected) == EPOCHS * steps
    for ids, _, _ in expected:
        assert len(set(ids.tolist())) == BATCH and not set(ids.tolist()) & set(BROKEN_IDS)
    draw = random.Random(form)
    combinations = [(ranks, workers) for ranks in (1, 2, 4) for workers in (0, 1, 3)]
    draw.shuffle(combinations)
    stops = sorted(draw.sample(range(1, EPOCHS * steps), len(combinations) - 1))
    for (ranks, workers), start, stop in zip(combinations, [0, *stops], [*stops, EPOCHS * steps], strict=True):
        shares = [Ranks(rank, ranks, None).share(BATCH) for rank in range(ranks)]
        parts = [read(loader_of(data, form, share=share, workers=workers), start, stop) for share in shares]
        for batches, step in zip(zip(*parts, strict=True), range(start, stop), strict=True):
            for one, other in zip(joined(batches), expected[step], strict=True):
                assert torch.equal(one, other)


def read(loader, start, stop):
    """The batches of steps `start` to `stop` of the run, as a run that is stopped and resumed reads them."""
    steps, batches = loader.steps_per_epoch, []
    while start + len(batches) < stop:
        epoch, step = divmod(start + len(batches), steps)
        for batch in loader.epoch(epoch, start=step):
            batches.append(batch)
            if start + len(batches) == stop:
                break
    return batches


def test_broken_samples_are_counted_on_the_rank_that_meets_them(data):
    batches = list(loader_of(data, "plain").epoch(0))
    met = sum(sum(batch.broken.values()) for batch in batches)
    assert met >= 2 and all(set(batch.broken) <= {"image"} for batch in batches)
    assert any("cannot decode the image of sample 000" in example for batch in batches for example in batch.examples)
    halves = [loader_of(data, "plain", share=Ranks(rank, 2, None).share(BATCH)).epoch(0) for rank in range(2)]
    assert sum(sum(batch.broken.values()) for half in halves for batch in half) == met


def test_captions_are_drawn_by_their_weights(data):
    source = Shards(str(data / "0.tar"), weights_key="weights")
    drawn = [source.caption(0, random.Random(number)) for number in range(2000)]
    assert 0.7 < drawn.count("second of 0") / 2000 < 0.8
    unweighted = Shards(str(data / "0.tar"))
    drawn = [unweighted.caption(0, random.Random(number)) for number in range(2000)]
    assert 0.45 < drawn.count("second of 0") / 2000 < 0.55


def test_too_many_broken_samples_end_the_run():
    count = BrokenCount(0.01)
    count.add(90, {"image": 10}, ["one is bad"])
    with pytest.raises(UserError, match=r"11 of 101 samples are broken.*10 image, 1 no caption.*one is bad"):
        count.add(0, {"no caption": 1})
    assert count.metrics() == {"broken_image": 10, "broken_no_caption": 1}
    late = BrokenCount(0.01)
    late.add(9_900, {"image": 100})
    with pytest.raises(UserError):
        late.add(0, {"image": 1})
    with pytest.raises(UserError):
        BrokenCount(0.0).add(10, {"image": 1})


def test_no_good_sample_is_left(tmp_path):
    write_shard(tmp_path / "a.tar", {"1.jpg": b"no image", "1.txt": b"x", "2.jpg": picture(2), "2.txt": b"y"})
    loader = TrainingLoader(
        Shards(str(tmp_path / "a.tar")), batch=2, transform=TrainingTransform(size=(16, 16)),
        tokenizer=tokenizer, seed=0, workers=0, pin_memory=False,
    )  # fmt: skip
    with pytest.raises(UserError, match="no sample is left to stand in"):
        next(loader.epoch(0))


def train(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["train", *(str(argument) for argument in arguments)])
    return stop.value.code


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == "train"}


FEW = (
    "--model leanclip-tiny --batch-size 12 --epochs 3 --log-every 1 --eval-every 0 --warmup 2 --lr 1e-3"
    " --loss fastclip-v3 --device cpu --caption-weights-key weights"
).split()


def test_a_trained_model_does_not_depend_on_workers_or_stops(data, tmp_path):
    """Three epochs at once, and in three parts with other numbers of workers; broken samples on the way."""
    common = ["--train-data", data, "--logs", tmp_path, *FEW]
    assert train(*common, "--name", "whole", "--workers", 0, "--save-every", 1, "--keep-last", 0) == 0
    whole = logged(tmp_path / "whole")
    assert len(whole) == 18 and whole[18]["broken_image"] >= 6
    for name, step, workers in (("a", 4, 1), ("b", 11, 3)):
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step_{step:08d}"
        assert train(*common, "--name", name, "--workers", workers, "--resume", checkpoint) == 0
        parts = logged(tmp_path / name)
        assert sorted(parts) == list(range(step + 1, 19))
        assert all(parts[number]["loss"] == whole[number]["loss"] for number in parts)


def test_training_stops_at_max_broken(data, tmp_path, capsys):
    common = ["--train-data", data, "--logs", tmp_path, *FEW, "--workers", 0]
    assert train(*common, "--name", "strict", "--max-broken", 0) == 2
    assert "more than --max-broken 0 (1 image), for example: cannot decode" in capsys.readouterr().err


def bases(run):
    manifest = json.loads((run / "manifest.json").read_text())
    return [(entry["name"], entry["base"]) for entry in manifest]


def test_shards_added_later_leave_old_ids_alone(data, tmp_path):
    shards = tmp_path / "shards"
    shutil.copytree(data, shards)
    common = ["--train-data", shards, "--logs", tmp_path, *FEW, "--workers", 0]
    assert train(*common, "--name", "run") == 0
    assert bases(tmp_path / "run") == [("0.tar", 0), ("1.tar", 40)]
    write_shard(shards / "00-before-all.tar", sound(20, start=100))
    assert train(*common, "--name", "run", "--resume", "latest", "--epochs", 4, "--max-broken", 1) == 0
    assert bases(tmp_path / "run") == [("0.tar", 0), ("1.tar", 40), ("00-before-all.tar", 80)]
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["epoch"] == 4


def test_a_split_stays_when_shards_are_added(data, tmp_path):
    shards = tmp_path / "shards"
    shutil.copytree(data, shards)
    config = DataConfig(train_data=str(shards), val_split=0.2)
    before = open_datasets(config, seed=0)
    assert before.val is not None
    manifest = before.train.source.manifest()
    write_shard(shards / "00-before-all.tar", sound(20, start=100))
    held_out, _ = open_validation(config, seed=0, manifest=manifest)
    assert held_out is not None and (held_out.ids == before.val.ids).all()
    assert held_out.source.captions(45) == before.val.source.captions(45)
    with pytest.raises(UserError, match="shards were added, and --val-split"):
        open_datasets(config, seed=0, manifest=manifest)


@pytest.mark.parametrize("change", ["changed", "removed"])
def test_a_shard_that_changed_is_named_on_resume(data, tmp_path, change, capsys):
    shards = tmp_path / "shards"
    shutil.copytree(data, shards)
    common = ["--train-data", shards, "--logs", tmp_path, *FEW, "--workers", 0, "--max-steps", 4]
    assert train(*common, "--name", "run") == 0
    if change == "changed":
        write_shard(shards / "1.tar", sound(40, start=41))
    else:
        (shards / "1.tar").unlink()
    assert train(*common, "--name", "run", "--resume", "latest") == 2
    expected = "1.tar has changed since the run began" if change == "changed" else "trained on 1.tar, which is not in"
    assert expected in capsys.readouterr().err


def test_a_shard_that_vanishes_during_training_is_replaced(data, tmp_path):
    shards = tmp_path / "shards"
    shutil.copytree(data, shards)
    source = Shards(str(shards))
    loader = TrainingLoader(
        source, batch=8, transform=TrainingTransform(size=(16, 16)), tokenizer=tokenizer, seed=0,
        workers=0, pin_memory=False,
    )  # fmt: skip
    (shards / "1.tar").unlink()
    batch = next(loader.epoch(0))
    assert (
        batch.broken["vanished"] >= 1 and (batch.sample_ids < 40).all() and len(set(batch.sample_ids.tolist())) == 8
    )


def test_the_counting_flags_of_others_are_explained(data, capsys):
    config = DataConfig(train_data=str(data), train_num_samples=99, data_size=80, train_data_upsampling_factors=None)
    assert len(open_datasets(config, seed=0).train) == 80
    explained = capsys.readouterr().err
    assert "--train-num-samples is not needed: the data hold 80 samples, not 99" in explained
    assert "--data-size is not needed: the data hold 80 samples, and" in explained


def test_factors_lengthen_the_epoch(data):
    config = DataConfig(train_data=f"{data}/0.tar::{data}/1.tar", train_data_upsampling_factors="2::0.5")
    found = open_datasets(config, seed=0)
    assert len(found.train) == 100 and len(found.train.source) == 80
    ids, _ = found.train.visits.at(np.arange(100), seed=0, epoch=0)
    assert (np.bincount(ids, minlength=80)[:40] == 2).all()
    with pytest.raises(UserError, match="2 sources and 1 factors"):
        open_datasets(DataConfig(train_data=config.train_data, train_data_upsampling_factors="2"), seed=0)
    with pytest.raises(ValueError, match="leaves no neighbours"):
        DataConfig(val_split=0.1, shuffle="blocks")
    with pytest.raises(ValueError, match="give numbers, as 2::1"):
        DataConfig(train_data_upsampling_factors="2:1")


def test_evaluation_leaves_broken_samples_out_and_says_so(data, tmp_path, capsys):
    common = ["--train-data", data, "--val-data", data, "--logs", tmp_path, *FEW, "--workers", 0, "--max-steps", 3]
    assert train(*common, "--name", "run") == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["metrics"]["images"] for line in lines if line["kind"] == "eval"] == [77, 77]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", str(tmp_path / "run"), "--device", "cpu"])
    assert stop.value.code == 0
    assert "3 held-out samples could not be used" in capsys.readouterr().out


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 1, 3])])
@pytest.mark.parametrize("light", [MAX_PICKLED_BYTES, 0])
def test_a_batch_comes_whole_from_another_process_and_what_is_small_without_shared_memory(
    lengths, light, monkeypatch
):
    monkeypatch.setattr("leanclip.data.batch.MAX_PICKLED_BYTES", light)
    sent = Batch(
        images=torch.arange(3 * MAX_PICKLED_BYTES).to(torch.uint8).view(3, 1, 512, -1),
        tokens=torch.tensor([[7, 8], [9, 0], [1, 2]]), sample_ids=torch.tensor([5, 3, 2**40]), lengths=lengths,
        broken={"image": 1}, examples=("a.jpg",),
    )  # fmt: skip
    tensors = []

    class Counting(ForkingPickler):
        def reducer_override(self, value):
            tensors.extend([value] if isinstance(value, torch.Tensor) else [])
            return NotImplemented

    Counting(io.BytesIO()).dump(sent)
    assert len(tensors) == (1 if light else 3 + (lengths is not None)) and tensors[0] is sent.images
    found = pickle.loads(bytes(ForkingPickler.dumps(sent)))
    for name in ("images", "tokens", "sample_ids"):
        assert torch.equal(getattr(found, name), getattr(sent, name))
    assert found.lengths is None if lengths is None else torch.equal(found.lengths, lengths)
    assert (found.broken, found.examples) == (sent.broken, sent.examples)


def test_a_batch_whose_tensors_have_no_array_is_pickled_as_they_are():
    sent = Batch(
        images=torch.ones(2, 3, dtype=torch.bfloat16), tokens=torch.empty(2, 3, device="meta", dtype=torch.int64),
        sample_ids=torch.arange(2),
    )  # fmt: skip
    found = copy.deepcopy(sent)
    assert found.images.dtype == torch.bfloat16 and found.tokens.is_meta and found.sample_ids.tolist() == [0, 1]


ORPHAN = """
import multiprocessing, time
from torch.utils.data import Dataset
from leanclip.data.loader import _data_loader

class Large(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, _):
        return bytes(1 << 20)  # more than a pipe holds

batches = iter(_data_loader(Large(), workers=1))
next(batches)
time.sleep(0.5)  # now the worker is blocked with its next one
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(100)
"""


def test_a_worker_ends_with_its_parent_even_if_nobody_takes_what_it_sends():
    """It holds copies of its parent's connections: other ranks would wait for a process that is dead."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        assert alive(worker)
        parent.kill()
    deadline = time.monotonic() + 20
    while alive(worker):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.1)


def alive(process):
    try:
        return process.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
