"""The sequence of global batches does not depend on ranks, workers or interruptions."""

import copy
import io
import json
import multiprocessing
import pickle
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_files import picture, sound, tokenizer, write_shard
from torch.utils.data._utils import signal_handling

from leanclip.data import Batch, BrokenCount, DataConfig, Shards, TrainingLoader, open_datasets, open_validation
from leanclip.data.batch import MAX_PICKLED_BYTES
from leanclip.data.decode import TrainingTransform
from leanclip.distributed import Ranks
from machine import is_alive, wait_until
from refusal import assert_refused, exit_code, refuses
from run_records import records

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


def create_loader(source, *, workers=0, **options):
    return TrainingLoader(
        source, transform=TrainingTransform(size=(16, 16), scale=(0.3, 1.0)), tokenizer=tokenizer, seed=SEED,
        workers=workers, pin_memory=False, **options,
    )  # fmt: skip


def loader_of(data, form, **options):
    factors = [1.5, 1.0] if form == "weighted" else None
    source = Shards(f"{data}/0.tar::{data}/1.tar", factors=factors, weights_key="weights")
    return create_loader(source, batch=BATCH, shuffle="blocks" if form == "blocks" else "all", **options)


def joined(batches):
    """The global batch from the shares of the ranks."""
    return tuple(
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("sample_ids", "tokens", "images")
    )


def test_groups_and_weights_come_from_the_metadata(tmp_path):
    """A sample whose weight is none is broken."""
    files = sound(12)
    for number in range(12):
        field = {"captions": ["a"], "quality": number / 4, "product": f"p{number % 3}"}
        files[f"{number:05d}.json"] = json.dumps(field | ({"quality": "much"} if number == 5 else {})).encode()
    loader = create_loader(
        Shards(str(write_shard(tmp_path / "0.tar", files))), batch=10, group_key="product", weight_key="quality"
    )
    (batch,) = pickle.loads(pickle.dumps(list(loader.epoch(0))))
    ids = batch.sample_ids.tolist()
    assert 5 not in ids and batch.broken in ({}, {"field": 1})
    assert batch.weights.tolist() == [number / 4 for number in ids]
    groups = dict(zip(ids, batch.groups.tolist(), strict=True))
    assert all((groups[one] == groups[two]) == (one % 3 == two % 3) for one in ids for two in ids)
    plain = create_loader(Shards(str(tmp_path / "0.tar")), batch=10)
    assert all(batch.groups is None and batch.weights is None for batch in plain.epoch(0))


@pytest.mark.parametrize("form", ["plain", "weighted", "blocks"])
def test_batches_do_not_depend_on_ranks_workers_or_interruptions(data, form):
    whole = loader_of(data, form)
    steps = whole.steps_per_epoch
    expected = [joined([batch]) for epoch in range(EPOCHS) for batch in whole.epoch(epoch)]
    assert len(expected) == EPOCHS * steps
    for ids, _, _ in expected:
        assert len(set(ids.tolist())) == BATCH and not set(ids.tolist()) & set(BROKEN_IDS)
    torch.manual_seed(99)  # the global random state must not matter
    draw = random.Random(form)
    combinations = [(ranks, workers) for ranks in (1, 2, 4) for workers in (0, 1, 3)]
    draw.shuffle(combinations)
    stops = sorted(draw.sample(range(1, EPOCHS * steps), len(combinations) - 1))
    for (ranks, workers), start, stop in zip(combinations, [0, *stops], [*stops, EPOCHS * steps], strict=True):
        shares = [Ranks(rank, ranks, None).share(BATCH) for rank in range(ranks)]
        parts = [read(loader_of(data, form, share=share, workers=workers), start, stop) for share in shares]
        for batches, step in zip(zip(*parts, strict=True), range(start, stop), strict=True):
            torch.testing.assert_close(joined(batches), expected[step], rtol=0, atol=0)


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


def test_broken_samples_are_counted_on_the_rank_that_reads_them(data):
    batches = list(loader_of(data, "plain").epoch(0))
    count = sum(sum(batch.broken.values()) for batch in batches)
    assert count >= 2 and all(set(batch.broken) <= {"image"} for batch in batches)
    assert any("cannot decode the image of sample 000" in example for batch in batches for example in batch.examples)
    halves = [loader_of(data, "plain", share=Ranks(rank, 2, None).share(BATCH)).epoch(0) for rank in range(2)]
    assert sum(sum(batch.broken.values()) for half in halves for batch in half) == count


@pytest.mark.parametrize(("weights_key", "low", "high"), [("weights", 0.7, 0.8), (None, 0.45, 0.55)])
def test_captions_are_drawn_by_their_weights(data, weights_key, low, high):
    source = Shards(str(data / "0.tar"), weights_key=weights_key)
    drawn = [source.caption(0, number / 2000)[0] for number in range(2000)]
    assert low < drawn.count("second of 0") / 2000 < high


def test_too_many_broken_samples_end_the_run():
    count = BrokenCount(0.01)
    count.add(90, {"image": 10}, ["one is bad"])
    with refuses("data.too_many_broken", "11 of 101", "10 image, 1 no caption", "one is bad"):
        count.add(0, {"no caption": 1})
    assert count.metrics() == {"broken_image": 10, "broken_no_caption": 1}
    late = BrokenCount(0.01)
    late.add(9_900, {"image": 100})
    with refuses("data.too_many_broken"):
        late.add(0, {"image": 1})
    with refuses("data.too_many_broken"):
        BrokenCount(0.0).add(10, {"image": 1})


def test_a_batch_without_enough_good_samples_is_an_error(tmp_path):
    files = {"1.jpg": b"no image", "1.txt": b"x", "2.jpg": picture(2), "2.txt": b"y"}
    source = Shards(str(write_shard(tmp_path / "a.tar", files)))
    with refuses("data.no_replacement", "1 of "):
        next(create_loader(source, batch=2).epoch(0))
    with refuses("data.too_few_samples"):
        create_loader(source, batch=3)


def train(*arguments):
    return exit_code("train", *arguments)


def logged(run):
    return {line["step"]: line for line in records(run, "train")}


FLAGS = (
    "--model leanclip-tiny --batch-size 12 --epochs 3 --log-every 1 --eval-every 0 --warmup 2 --lr 1e-3"
    " --loss fastclip-v3 --device cpu --caption-weights-key weights"
).split()


def test_training_stops_at_max_broken(data, tmp_path, capsys):
    common = ["--train-data", data, "--logs", tmp_path, *FLAGS, "--workers", 0]
    command = ["train", *common, "--name", "strict", "--max-broken", 0]
    assert_refused("data.too_many_broken", command, capsys, "broken (1 image), more than --max-broken 0,")


@pytest.fixture
def copied(data, tmp_path):
    """The shards, to be changed by the test."""
    return Path(shutil.copytree(data, tmp_path / "shards"))


def bases(run):
    manifest = json.loads((run / "manifest.json").read_text())
    return [(entry["name"], entry["base"]) for entry in manifest]


def test_added_shards_do_not_change_existing_ids(copied, tmp_path):
    common = ["--train-data", copied, "--logs", tmp_path, *FLAGS, "--workers", 0]
    assert train(*common, "--name", "run") == 0
    assert bases(tmp_path / "run") == [("0.tar", 0), ("1.tar", 40)]
    write_shard(copied / "00-before-all.tar", sound(20, start=100))
    assert train(*common, "--name", "run", "--resume", "latest", "--epochs", 4, "--max-broken", 1) == 0
    assert bases(tmp_path / "run") == [("0.tar", 0), ("1.tar", 40), ("00-before-all.tar", 80)]
    assert records(tmp_path / "run")[-1]["epoch"] == 4


def test_added_shards_do_not_change_the_split(copied):
    config = DataConfig(train_data=str(copied), val_split=0.2)
    before = open_datasets(config, seed=0)
    assert before.val is not None
    manifest = before.train.source.manifest()
    write_shard(copied / "00-before-all.tar", sound(20, start=100))
    held_out, _ = open_validation(config, seed=0, manifest=manifest)
    assert held_out is not None and (held_out.ids == before.val.ids).all()
    assert held_out.source.captions(45) == before.val.source.captions(45)
    with refuses("data.split_changed", "--val-split"):
        open_datasets(config, seed=0, manifest=manifest)


@pytest.mark.parametrize("code", ["data.changed", "data.missing_shard"])
def test_a_changed_or_missing_shard_is_named_on_resume(copied, tmp_path, code, capsys):
    common = ["--train-data", copied, "--logs", tmp_path, *FLAGS, "--workers", 0, "--max-steps", 4, "--name", "run"]
    assert train(*common) == 0
    (copied / "1.tar").unlink()
    if code == "data.changed":
        write_shard(copied / "1.tar", sound(40, start=41))
    assert_refused(code, ["train", *common, "--resume", "latest"], capsys, "1.tar")


def test_a_shard_deleted_during_training_is_replaced(copied):
    loader = create_loader(Shards(str(copied)), batch=8)
    (copied / "1.tar").unlink()
    batch = next(loader.epoch(0))
    assert batch.broken["vanished"] >= 1
    assert (batch.sample_ids < 40).all() and len(set(batch.sample_ids.tolist())) == 8


def test_ignored_sample_counts_are_explained(data, capsys):
    config = DataConfig(train_data=str(data), train_num_samples=99, data_size=80, train_data_upsampling_factors=None)
    assert len(open_datasets(config, seed=0).train) == 80
    explained = capsys.readouterr().err
    assert "--train-num-samples is not needed: the data hold 80 samples, not 99" in explained
    assert "--data-size is not needed: the data hold 80 samples, and" in explained


def test_factors_set_the_length_of_the_epoch(data):
    config = DataConfig(train_data=f"{data}/0.tar::{data}/1.tar", train_data_upsampling_factors="2::0.5")
    train_set = open_datasets(config, seed=0).train
    assert len(train_set) == 100 and len(train_set.source) == 80
    ids, _ = train_set.visits.at(np.arange(100), seed=0, epoch=0)
    assert (np.bincount(ids, minlength=80)[:40] == 2).all()
    with refuses("data.factor_count", "2 sources and 1 factors"):
        open_datasets(replace(config, train_data_upsampling_factors="2"), seed=0)
    with refuses("data.split_weighted", "--val-split"):
        open_datasets(replace(config, val_split=0.1), seed=0)
    with pytest.raises(ValueError, match="--shuffle blocks"):
        DataConfig(val_split=0.1, shuffle="blocks")
    with pytest.raises(ValueError, match="train_data_upsampling_factors"):
        DataConfig(train_data_upsampling_factors="2:1")


def test_evaluation_skips_and_counts_broken_samples(data, tmp_path, capsys):
    common = ["--train-data", data, "--val-data", data, "--logs", tmp_path, *FLAGS, "--workers", 0, "--max-steps", 3]
    assert train(*common, "--name", "run") == 0
    assert [line["metrics"]["images"] for line in records(tmp_path / "run", "eval")] == [77, 77]
    capsys.readouterr()
    assert exit_code("evaluate", tmp_path / "run", "--device", "cpu") == 0
    assert "3 held-out samples" in capsys.readouterr().out


@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 1, 3])])
@pytest.mark.parametrize("limit", [MAX_PICKLED_BYTES, 0])
def test_a_batch_is_pickled_with_small_tensors_by_value(lengths, limit, monkeypatch):
    monkeypatch.setattr("leanclip.data.batch.MAX_PICKLED_BYTES", limit)
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
    assert len(tensors) == (1 if limit else 3 + (lengths is not None)) and tensors[0] is sent.images
    received = pickle.loads(bytes(ForkingPickler.dumps(sent)))
    for name in ("images", "tokens", "sample_ids"):
        assert torch.equal(getattr(received, name), getattr(sent, name))
    assert received.lengths is None if lengths is None else torch.equal(received.lengths, lengths)
    assert (received.broken, received.examples) == (sent.broken, sent.examples)


def test_a_batch_with_bfloat16_and_meta_tensors_is_pickled():
    sent = Batch(
        images=torch.ones(2, 3, dtype=torch.bfloat16), tokens=torch.empty(2, 3, device="meta", dtype=torch.int64),
        sample_ids=torch.arange(2),
    )  # fmt: skip
    received = copy.deepcopy(sent)
    assert received.images.dtype == torch.bfloat16 and received.tokens.is_meta
    assert received.sample_ids.tolist() == [0, 1]


@pytest.mark.parametrize("threads", [0, 1])
def test_a_killed_worker_ends_the_run_in_one_line(data, threads, monkeypatch):
    """In the main thread torch reports it by a signal handler; in the prefetch thread the queue does."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)

    def read_on():
        others = multiprocessing.active_children()
        next(loader.epoch(0))
        for worker in set(multiprocessing.active_children()) - set(others):
            worker.kill()
        for epoch in range(100):
            list(loader.epoch(epoch))

    loader = loader_of(data, "plain", workers=1)
    try:
        with refuses("data.worker_killed", "--workers"):
            if not threads:
                read_on()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(read_on).result()
    finally:
        signal.signal(signal.SIGCHLD, handler)


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
time.sleep(0.5)  # now the worker is blocked in sending the next one
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(100)
"""


def test_a_worker_blocked_in_sending_ends_with_its_parent():
    """It holds copies of its parent's connections: other ranks would wait for a dead process."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_alive(worker)
        parent.kill()
    wait_until(lambda: not is_alive(worker), 20, "an orphan")


def test_epochs_do_not_pile_up_signal_handlers(tmp_path):
    """Each wraps torch's handler once: nested ones exhausted the stack after some hundred epochs."""
    shards = Shards(str(write_shard(tmp_path / "a.tar", sound(4))))
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        for _ in range(3):
            loader = TrainingLoader(
                shards, batch=2, transform=TrainingTransform(size=(8, 8)), tokenizer=tokenizer, seed=1, workers=1,
                pin_memory=False,
            )  # fmt: skip
            assert sum(len(batch) for batch in loader.epoch(0)) == 4
        installed: Any = signal.getsignal(signal.SIGCHLD)
        assert hasattr(installed, "__wrapped__") and not hasattr(installed.__wrapped__, "__wrapped__")
    finally:
        signal.signal(signal.SIGCHLD, handler)
