"""leanclip embed: vectors and keys of every kind of data, resumed and refused."""

import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch
from data_forms import make_csv, make_folder, write_images
from safetensors.torch import load_file, save_file
from shard_files import picture, sound, write_shard

import leanclip
from leanclip.data import EvaluationTransform
from leanclip.data.feature_table import FeatureTable
from leanclip.models import WEIGHTS_FILE, TwoTower
from leanclip.search.embed import place_of
from leanclip.search.engine import open_engine
from leanclip.search.store import EmbeddingStore, stored_key
from refusal import assert_refused, exit_code, refuses


def command(model, data, out, *flags):
    return ["embed", model, data, out, "--device", "cpu", "--workers", 0, *flags]


def embed(*arguments):
    return exit_code(*command(*arguments))


@pytest.fixture
def shards(tmp_path):
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards/000.tar", sound(20))
    write_shard(tmp_path / "shards/001.tar", sound(15, start=20))
    return tmp_path / "shards"


def test_vectors_and_keys_of_shards(small_run, shards, tmp_path, capsys):
    out = tmp_path / "out"
    assert embed(small_run, shards, out) == 0
    printed = capsys.readouterr().out
    assert f"images: 35 vectors of 48 in {out}/images/features.npy" in printed
    assert f"leanclip search {out}" in printed
    model, _, tokenizer = leanclip.load(small_run)
    source = leanclip.data.Shards(str(shards))
    pixels = torch.stack([EvaluationTransform(model.preprocess)(source.image_bytes(i)) for i in range(35)])
    with torch.no_grad():
        images = model.encode_image(pixels).numpy()
        texts = model.encode_text(tokenizer([text for i in range(35) for text in source.captions(i)])).numpy()
    np.testing.assert_allclose(np.load(out / "images/features.npy"), images, atol=5e-4)
    np.testing.assert_allclose(np.load(out / "captions/features.npy"), texts, atol=5e-4)
    norms = np.linalg.norm(np.load(out / "images/features.npy").astype(float), axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-3)
    assert np.load(out / "keys.npy").astype(str).tolist() == [f"{number:05d}" for number in range(35)]
    assert np.load(out / "captions/first.npy")[:5].tolist() == [0, 2, 3, 4, 6]  # every third has two captions
    rows = pyarrow.parquet.read_table(out / "keys.parquet").to_pylist()
    assert rows[21] == {
        "id": 21, "key": "00021", "shard": str(shards / "001.tar"), "images_first": 21, "images_rows": 1,
        "captions_first": 28, "captions_rows": 2,
    }  # fmt: skip
    facts = json.loads((out / "embeddings.json").read_text())
    assert facts["model"]["place"] == str(small_run / "checkpoints/step_00000015")
    assert len(facts["model"]["digest"]) == 64
    assert facts["model"]["preprocess"]["size"] == [32, 32]
    assert facts["data"]["location"] == str(shards)
    assert facts["shards"] == [[str(shards / "000.tar"), 0], [str(shards / "001.tar"), 20]]


def make_class_shard(folder):
    folder.mkdir()
    files = {f"{i:03d}.{end}": content for i in range(6) for end, content in (("jpg", picture(i)), ("cls", b"1"))}
    (folder / "classnames.txt").write_text("cat\ndog\n")
    return write_shard(folder / "a.tar", files)


def make_plain_folder(folder):
    write_images(folder / "sub", 6)
    (folder / "sub/000.jpg").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize(
    ("make", "keys", "captions"),
    [
        (lambda folder: make_csv(folder, 6), [f"images/{i:03d}.jpg" for i in range(6)], 6),
        (lambda folder: make_folder(folder, 6), ["001.jpg", "003.jpg", "005.jpg", "deep/er/000.jpg"], 6),
        (make_plain_folder, [f"sub/{i:03d}.jpg" for i in range(6)], None),
        (make_class_shard, [f"{i:03d}" for i in range(6)], 6),
        (lambda _: "synthetic:6", list("012345"), 6),
    ],
    ids=["csv", "folder", "folder without captions", "shards with classes", "synthetic"],
)
def test_other_data(make, keys, captions, small_run, tmp_path):
    assert embed(small_run, make(tmp_path / "data"), tmp_path / "out") == 0
    store = EmbeddingStore(tmp_path / "out")
    assert [store.key(number) for number in range(len(keys))] == keys
    assert (len(store.tables["captions"].features) if "captions" in store.tables else None) == captions
    broken = [number for number, good in enumerate(store.usable("images")) if not good]
    assert broken == ([0] if make is make_plain_folder else [])
    assert not store.tables["images"].features[broken].any()


def test_one_side_first_and_the_other_later(small_run, shards, tmp_path):
    assert embed(small_run, shards, tmp_path / "out", "--of", "captions") == 0
    assert list(EmbeddingStore(tmp_path / "out").tables) == ["captions"]
    assert embed(small_run, shards, tmp_path / "out", "--of", "images") == 0
    assert embed(small_run, shards, tmp_path / "both") == 0
    for name in ("images/features.npy", "captions/features.npy", "keys.npy", "keys.parquet"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "both" / name).read_bytes()


def test_only_the_side_that_lacks_is_read_and_computed(small_run, shards, tmp_path, monkeypatch):
    decoded, texts = [], []
    decode, encode = EvaluationTransform.__call__, TwoTower.encode_text
    monkeypatch.setattr(EvaluationTransform, "__call__", lambda *a: decoded.append(1) or decode(*a))
    monkeypatch.setattr(TwoTower, "encode_text", lambda self, tokens: texts.append(1) or encode(self, tokens))
    assert embed(small_run, shards, tmp_path / "out", "--of", "images") == 0
    assert (len(decoded), len(texts)) == (35, 0)
    assert embed(small_run, shards, tmp_path / "out", "--of", "captions") == 0
    assert (len(decoded), len(texts)) == (35, 1)
    done = np.load(tmp_path / "out/images/done.npy", mmap_mode="r+")
    done[3] = 0  # killed before it was marked
    done.flush()
    assert embed(small_run, shards, tmp_path / "out") == 0
    assert (len(decoded), len(texts)) == (70, 1)


def test_a_run_that_trained_on_is_named_by_its_steps(small_run, shards, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(small_run, run, symlinks=True)
    assert embed(run, shards, tmp_path / "out", "--of", "images") == 0
    later = run / "checkpoints/step_00000030"
    shutil.copytree(run / "checkpoints/step_00000015", later)
    weights = load_file(later / WEIGHTS_FILE)
    save_file({name: value * 2 if "proj" in name else value for name, value in weights.items()}, later / WEIGHTS_FILE)
    (run / "checkpoints/last").unlink()
    (run / "checkpoints/last").symlink_to(later.name)
    open_engine(str(tmp_path / "out"), device="cpu")  # with the checkpoint that it was embedded with
    words = "step_00000015 (step 15, weights", "step_00000030 (step 30, weights"
    again = command(run, shards, tmp_path / "out", "--of", "images")
    assert_refused("search.other_model", again, capsys, *words)
    with refuses("search.other_model", "step 15", "step 30"):
        open_engine(str(tmp_path / "out"), model=str(run), device="cpu")
    shutil.rmtree(run / "checkpoints/step_00000015")
    with refuses("search.model_moved", "step 15", "--model"):
        open_engine(str(tmp_path / "out"), device="cpu")


def test_a_finished_store_is_read_and_nothing_is_computed(small_run, shards, tmp_path, monkeypatch, capsys):
    assert embed(small_run, shards, tmp_path / "out") == 0
    monkeypatch.setattr(FeatureTable, "write", lambda *_: pytest.fail("computed again"))
    assert embed(small_run, shards, tmp_path / "out") == 0
    assert "35 of 35 samples are embedded already" in capsys.readouterr().out


def test_refusals(small_run, shards, tmp_path, capsys):
    out = tmp_path / "out"
    assert embed(small_run, shards, out, "--of", "images") == 0
    other = tmp_path / "other.safetensors"
    assert exit_code("export", small_run, other) == 0
    weights = leanclip.load(other)[0]
    assert embed(other, shards, out, "--of", "images") == 0  # the same weights elsewhere
    with torch.no_grad():
        weights.clip.visual.proj.mul_(2)
    from leanclip.models.export import export_open_clip

    export_open_clip(weights, other, overwrite=True)
    assert_refused("search.other_model", command(other, shards, out), capsys, small_run, other)
    write_shard(shards / "002.tar", sound(1, start=90))
    write_images(tmp_path / "only", 2)
    for code, *arguments in (
        ("search.other_data", shards, out),
        ("search.other_model", shards, out, "--precision", "amp_bf16"),
        ("embed.exists", shards, tmp_path),  # a directory with other files
        ("embed.not_writable", shards, tmp_path / "other.safetensors/x"),
        ("embed.no_captions", tmp_path / "only", tmp_path / "c", "--of", "captions"),
    ):
        assert_refused(code, command(small_run, *arguments), capsys)


@pytest.mark.parametrize("name", ["images/features.npy", "keys.npy", "images/first.npy", "embeddings.json"])
def test_parts_that_do_not_belong_together_are_refused(name, small_run, shards, tmp_path, capsys):
    out = tmp_path / "out"
    assert embed(small_run, shards, out, "--of", "images") == 0
    if name.endswith(".npy"):
        np.save(out / name, np.load(out / name)[:5, :7] if "features" in name else np.load(out / name)[:5])
    else:
        (out / name).write_text("{}")
    assert_refused("search.bad_embeddings", command(small_run, shards, out, "--of", "images"), capsys)


def test_a_long_key_keeps_its_beginning_and_stays_distinct():
    first, second = (stored_key("ü" * 40 + end, 32) for end in "ab")
    assert len(first) == len(second) == 32 and first != second
    assert first.startswith("üüü".encode()) and stored_key("short\0", 32).decode() == "short\N{REPLACEMENT CHARACTER}"


def test_a_model_is_recorded_by_a_name_that_does_not_depend_on_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.pt").touch()
    assert place_of("w.pt") == str(tmp_path / "w.pt")
    assert place_of("ViT-B-32:w.pt") == f"ViT-B-32:{tmp_path}/w.pt"
    assert place_of("ViT-B-32:openai") == "ViT-B-32:openai"
