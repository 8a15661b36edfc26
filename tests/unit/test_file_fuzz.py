"""Every file that a command reads and has not written in this run, damaged in many ways.

What may come of it: the right data, a counted broken sample, or a UserError of one line. Never another exception, a
hang, more than 2 GiB of memory, or other data from a file that leanclip protects by a checksum.
"""

import contextlib
import json
import os
import shutil

import numpy as np
import pytest
from checkpoint_runs import TINY, train
from data_forms import make_coco, make_csv, make_flickr_folder, make_listed_folder, make_parquet_bytes, make_tsv
from file_fuzz import BINARY, TEXT, Target, fuzz, limits, samples
from shard_files import sound, write_shard
from test_report_comparison import zero_shot
from test_report_pair_weights import suspects

from leanclip.checkpointing.resume import SavedRun, find_checkpoint
from leanclip.cli.train import parse_command
from leanclip.data import BrokenSample, Shards, index
from leanclip.data.csv_table import Table
from leanclip.data.exclusion.listed import listed_samples
from leanclip.data.index import INDEX_NAME
from leanclip.data.shards import load_manifest
from leanclip.errors import UserError
from leanclip.models import ModelConfig, check_vocabulary, create_model
from leanclip.packing.coco import Coco
from leanclip.packing.folder import Folder
from leanclip.packing.pack import JOURNAL, PackConfig, pack
from leanclip.packing.parquet import Parquet
from leanclip.reporting import write_report
from leanclip.runs.metrics import MetricsLog
from leanclip.search.store import COLUMNS, EmbeddingStore
from leanclip.suspects.table import Suspect, write_table


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert train(folder, max_steps=4, eval_every=2, val_data=str(write_shard(folder / "val.tar", sound(6)))) == 0
    return folder / "logs/run"


def run_copy(finished_run, folder):
    return shutil.copytree(finished_run, folder / "run")


def index_cache(folder, _):
    shard = write_shard(folder / "data.tar", sound(8))
    with pytest.MonkeyPatch.context() as patch:  # not for the bundled data, which other targets read
        patch.setattr(index, "MIN_KEPT_BYTES", 0)
        Shards(str(shard))
    return Target(folder / INDEX_NAME, lambda: samples(Shards(str(shard))), exact=True)


def manifest(folder, finished_run):
    path = run_copy(finished_run, folder) / "manifest.json"
    return Target(path, lambda: str(load_manifest(path)))


def run_config(folder, finished_run):
    path = run_copy(finished_run, folder) / "config.toml"
    return Target(path, lambda: str(parse_command(["--config", str(path)])))


def metrics_of_resumed_run(folder, finished_run):
    path = run_copy(finished_run, folder) / "metrics.jsonl"

    def resume():
        log = MetricsLog(path, resume_at=2)
        log.close()
        return str(log.results)

    return Target(path, resume)


def checkpoint_state(folder, finished_run):
    """A checkpoint that is damaged is skipped, and the one before it is used: other data, which the log names."""
    run = run_copy(finished_run, folder)
    newest = max((run / "checkpoints").glob("step_*"))

    def resume():
        path, warnings = find_checkpoint("latest", run)
        assert path is not None
        saved = SavedRun.open(path)
        if path == newest:
            return json.dumps(saved.content, sort_keys=True), str(saved.position), str(saved.manifest)
        assert warnings
        return "the one before"

    return Target(newest / "state.json", resume)


def reported(name):
    def target(folder, finished_run):
        run = run_copy(finished_run, folder)
        (run / "zero_shot.json").write_text(json.dumps(zero_shot(["cats", "dogs", "hats"])))
        (run / "suspects.json").write_text(json.dumps(suspects(3)))
        assert (run / name).is_file(), sorted(path.name for path in run.iterdir())
        return Target(run / name, lambda: len(write_report(run).read_bytes()))

    return target


def csv_table(folder, _):
    path = make_csv(folder, 6)
    return Target(path, lambda: samples(Table(path)))


def tsv_table(folder, _):
    path = make_tsv(folder, 6)
    return Target(path, lambda: samples(Table(path)))


def captions_list(make, name):
    def target(folder, _):
        make(folder / "images", 6)
        (path,) = (folder / "images").rglob(name)
        return Target(path, lambda: samples(Folder(folder / "images")))

    return target


def coco(folder, _):
    path = make_coco(folder, 6)
    return Target(path, lambda: samples(Coco(path)))


def parquet(folder, _):
    make_parquet_bytes(folder, 6)
    return Target(folder / "1.parquet", lambda: samples(Parquet(folder)), damages=BINARY)


def pack_journal(folder, _):
    """Whatever the journal says, the shards have the same bytes."""
    source, out = Folder(make_listed_folder(folder / "images", 6)), folder / "shards"

    def resume():
        summary = pack(source, out, PackConfig(samples_per_shard=2))
        assert summary.shards == 3
        return tuple(path.read_bytes() for path in sorted(out.glob("*.tar")))

    resume()
    return Target(out / JOURNAL, resume, exact=True)


def excluded(folder, _):
    """A table of suspects."""
    shards, path = Shards(str(write_shard(folder / "data.tar", sound(8)))), folder / "suspects.csv"
    rows = [Suspect(n + 1, n, f"{n:05d}", str(folder / "data.tar"), "a caption", 1.5, 0.9, "0") for n in range(6)]
    write_table(path, iter(rows))
    return Target(path, lambda: str(listed_samples(str(path), shards)))


def embeddings(name):
    def target(folder, _):
        facts = {
            "format": 1,
            "model": {"place": "a/model", "digest": "0123abc", "dim": 3, "preprocess": {}, "precision": "fp32"},
            "data": {"location": "data", "samples": 6, "identity": [], "columns": dict.fromkeys(COLUMNS)},
            "shards": [["a/0.tar", 0], ["a/1.tar", 4]],
        }
        store = EmbeddingStore.create(folder / "out", facts, {"images": np.arange(7)}, key_bytes=16)
        store.write_keys(list(range(6)), [f"key {number}" for number in range(6)])
        store.tables["images"].write(range(5), np.ones((5, 3), np.float16))
        store.tables["images"].mark_broken(5, "image", "no pixels")

        def read():
            opened = EmbeddingStore(folder / "out")
            table = opened.tables["images"]
            ids = range(opened.samples)
            rows = [str(_row(table, index)) for index in ids]
            parts = str(opened.facts), str([opened.ids_of_shard(int(opened.shard_number(index))) for index in ids])
            return *parts, str([opened.key(index) for index in ids]), *rows

        return Target(folder / "out" / name, read, damages=TEXT if name.endswith("json") else BINARY)

    return target


def _row(table, index):
    try:
        return table.rows(index)
    except BrokenSample as broken:
        return broken.kind


def model_config(folder, _):
    path = folder / "model.json"
    path.write_text(json.dumps(TINY | {"quick_gelu": False, "custom_text": True}, indent=1))

    def build():
        model = create_model(ModelConfig(model=str(path)))
        check_vocabulary(model)
        return model.encode_text(model.tokenizer(["a cat"])).shape, sum(p.numel() for p in model.parameters())

    return Target(path, build)


TARGETS = {
    "index cache": (index_cache, 600),
    "manifest": (manifest, 500),
    "config.toml": (run_config, 400),
    "metrics.jsonl, resumed": (metrics_of_resumed_run, 500),
    "state.json": (checkpoint_state, 400),
    "metrics.jsonl, reported": (reported("metrics.jsonl"), 250),
    "run.json": (reported("run.json"), 250),
    "panel.json": (reported("panel.json"), 250),
    "zero_shot.json": (reported("zero_shot.json"), 250),
    "suspects.json": (reported("suspects.json"), 250),
    "CSV": (csv_table, 500),
    "TSV": (tsv_table, 200),
    "captions.txt": (captions_list(make_flickr_folder, "captions.txt"), 400),
    "metadata.jsonl": (captions_list(make_listed_folder, "metadata.jsonl"), 400),
    "COCO": (coco, 400),
    "parquet": (parquet, 300),
    "model config": (model_config, 300),
    "pack.jsonl": (pack_journal, 200),
    "suspects.csv": (excluded, 300),
    "embeddings.json": (embeddings("embeddings.json"), 400),
    "keys.npy": (embeddings("keys.npy"), 200),
    "first.npy": (embeddings("images/first.npy"), 300),
    "done.npy": (embeddings("images/done.npy"), 200),
    "broken.jsonl": (embeddings("images/broken.jsonl"), 200),
}


def run_fuzz(name, folder, finished_run, *, factor=1, seed=0):
    make, cases = TARGETS[name]
    return fuzz(make(folder, finished_run), cases=factor * cases, seed=seed)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))


def test_the_number_of_cases():
    assert sum(cases for _, cases in TARGETS.values()) >= 5000


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_gives_data_or_one_line(name, tmp_path, finished_run):
    outcomes = run_fuzz(name, tmp_path, finished_run)
    protected = name in ("index cache", "pack.jsonl", "broken.jsonl")
    assert outcomes["other"] + outcomes["error"] + outcomes["same"] * protected > 20, outcomes


@pytest.mark.parametrize("name", TARGETS)
def test_a_file_of_three_gigabytes_of_zeros_takes_neither_memory_nor_time(name, tmp_path, finished_run):
    target = TARGETS[name][0](tmp_path, finished_run)
    target.read()
    os.truncate(target.path, 3 << 30)
    with limits(), contextlib.suppress(UserError):
        target.read()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_more_damaged_files(name, tmp_path, finished_run):
    run_fuzz(name, tmp_path, finished_run, factor=10, seed=1_000_000)
