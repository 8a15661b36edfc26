"""Opening the bundled data, shards by pattern, and held-out splits."""

import json

import pytest
from data_forms import make_csv
from shard_files import picture, sound, write_shard

from leanclip.config import TrainConfig, override
from leanclip.data import DataConfig, Shards, check_manifest, load_manifest, open_datasets
from leanclip.data.datasets import BUNDLED
from leanclip.data.files import expand
from leanclip.errors import UserError
from refusal import refusal, refusal_code, refuses


def test_the_bundled_data_are_complete():
    data = open_datasets(DataConfig(), seed=0)
    assert len(data.train) == 1830
    assert data.val is not None and len(data.val) == 200
    assert data.note is not None and "unseen renders of known concepts" in data.note
    assert data.train.source.captions(0) == ["spider web"]
    notices = (BUNDLED / "LICENSES.md").read_text()
    for name in ("Fluent", "MIT License", "Noto", "Apache License", "Unicode"):
        assert name in notices


def test_captions_come_from_json_or_text(tmp_path):
    several = {"captions": ["one", "two"]}
    path = write_shard(
        tmp_path / "a.tar",
        {
            "a/1.jpg": picture(1), "a/1.txt": b"one", "a/1.json": json.dumps(several).encode(),
            "a/2.jpg": picture(2), "a/2.txt": " ünï ".encode(),
            "a/2b.jpg": picture(2), "a/2b.json": b'{"captions": "just one"}',
            "a/3.jpg": picture(3),
            "a/4.txt": b"no image",
        },
    )  # fmt: skip
    shards = Shards(str(path))
    assert [shards.captions(i) for i in range(len(shards))] == [["one", "two"], ["ünï"], ["just one"]]
    assert shards.broken == {"no caption": 1, "no image": 1}


def test_patterns_expand_in_a_stable_order(tmp_path):
    for number in range(3):
        write_shard(tmp_path / f"s-{number:02d}.tar", sound(1))
    expected = [str(tmp_path / f"s-{number:02d}.tar") for number in range(3)]
    for pattern in ("s-{00..02}.tar", "s-*.tar", ""):
        assert expand(str(tmp_path / pattern)) == expected
    with refuses("data.not_found", "s-03.tar (from", "s-{00..03}.tar"):
        Shards(str(tmp_path / "s-{00..03}.tar"))


@pytest.mark.parametrize(
    "braces", ["{0..99999999999}", "{5..-9999999}{a,b}", "{0..9}" * 40, "{" + "9" * 5000 + "..1}"]
)
def test_braces_that_name_too_many_files_are_refused(braces):
    with refuses("data.bad_pattern"):
        expand(f"a-{braces}.tar")


def test_a_split_of_nothing_is_refused():
    with refuses("data.empty_split", "--val-split", "such as 0.02"):
        open_datasets(DataConfig(val_split=1e-6), seed=4)


VALID = {"name": "0.tar", "size": 10, "count": 3, "base": 0, "stamp": 5}
DAMAGED = [
    *({**VALID, key: value} for key in (*VALID, "version", "sample") if key != "name" for value in (-1, 1 << 70)),
    {**VALID, "version": 3}, {**VALID, "count": float("inf")}, {**VALID, "base": 1}, {**VALID, "size": "x"},
    {"name": "0.tar"}, 5, "text",
]  # fmt: skip


def test_a_manifest_with_impossible_values_is_refused(tmp_path):
    path = tmp_path / "manifest.json"
    assert load_manifest(path) is None
    path.write_text(json.dumps([VALID, {**VALID, "base": 3, "version": 2}]))
    assert load_manifest(path) == [VALID, {**VALID, "base": 3, "version": 2}]
    for entry in DAMAGED:
        with refuses("data.bad_manifest", "state.json"):
            check_manifest([entry], "state.json")
    for text in ("[" * 100_000, json.dumps([VALID]).replace("10", "1" + "0" * 400), "[", "{}", "null"):
        path.write_text(text)
        with pytest.raises(UserError) as raised:
            load_manifest(path)
        assert raised.value.code in ("data.bad_manifest", "file.bad_json")


@pytest.mark.parametrize("form", ["shards", "csv"])
@pytest.mark.parametrize("flag", ["pair_weights", "group_key", "caption_key", "caption_weights_key"])
def test_a_field_that_no_sample_has_is_refused_before_anything_is_read(tmp_path, form, flag):
    """The last sample alone has `late`."""
    files = sound(30) | {"00029.json": b'{"late": 1}', "00029.txt": b"late"}
    data = write_shard(tmp_path / "a.tar", files) if form == "shards" else make_csv(tmp_path, 3)
    config = override(TrainConfig(), {"train_data": str(data), flag: "atuo"}, "test").data
    if form == "csv" and "caption" in flag:  # they name keys of a .json
        assert open_datasets(config, seed=0)
        return
    code = "missing_field" if form == "shards" else "missing_column"
    with refuses(f"data.{code}", "atuo", f"--{flag.replace('_', '-')}"):
        open_datasets(config, seed=0)
    if form == "shards":
        assert open_datasets(override(TrainConfig(), {"train_data": str(data), flag: "late"}, "test").data, seed=0)


def test_a_check_refuses_a_caption_key_that_no_sample_has(tmp_path, capsys):
    data = write_shard(tmp_path / "a.tar", sound(5))
    assert refusal_code(refusal(["data", "check", data, "--caption-key", "nope"], capsys)) == "data.missing_field"


@pytest.mark.parametrize("samples", [{}, {"1.txt": b"x"}])
def test_shards_without_samples_are_refused(tmp_path, samples):
    with refuses("data.no_samples", "bad.tar"):
        Shards(str(write_shard(tmp_path / "bad.tar", samples)))
