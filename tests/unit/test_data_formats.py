"""Training straight from tables and from synthetic data, and packing every other form first."""

import contextlib
import io
import json
import math
import pickle

import numpy as np
import pytest
from data_forms import DIRECT, PACKABLE, bundled, make_csv, write_images, write_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from leanclip.cli import main
from leanclip.data import BrokenSample, DataConfig, Shards, open_source
from leanclip.data.csv_table import SEPARATORS, Table
from leanclip.data.synthetic import Synthetic
from leanclip.errors import UserError
from leanclip.models import TokenCounter

COUNT = 12


def command(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


def train(logs, data, *, batch=4):
    few = "--model leanclip-tiny --max-steps 3 --log-every 1 --eval-every 0 --workers 0".split()
    few += ["--batch-size", batch, "--logs", logs, "--name", "run"]
    assert command("train", *few, "--train-data", data) == 0
    lines = [json.loads(line) for line in (logs / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)
    return json.loads((logs / "run" / "run.json").read_text())


@pytest.mark.parametrize("form", DIRECT)
def test_tables_train_directly(form, tmp_path):
    data = DIRECT[form](tmp_path / "data", COUNT)
    assert train(tmp_path / "logs", data)["train_samples"] == COUNT


@pytest.mark.parametrize("form", PACKABLE)
def test_every_form_packs_to_the_same_pictures_and_trains(form, tmp_path):
    data, shards = PACKABLE[form](tmp_path / "data", COUNT), tmp_path / "shards"
    assert command("data", "pack", data, shards, "--samples-per-shard", "5", "--workers", "1") == 0
    assert sorted(path.name for path in shards.iterdir()) == ["00000.tar", "00001.tar", "00002.tar", "pack.jsonl"]
    packed = Shards(str(shards))
    found = {packed.image_bytes(i): packed.captions(i) for i in range(len(packed))}
    for image, caption in bundled(COUNT):
        captions = found.pop(image)
        assert all(text.startswith(caption) for text in captions)
        assert len(captions) == {"parquet of Hugging Face": 2, "folder with captions.txt": 3, "coco": 2}.get(form, 1)
    assert not found
    assert train(tmp_path / "logs", shards)["train_samples"] == COUNT


def test_a_run_on_a_table_goes_on_with_more_rows_and_not_with_others(tmp_path, capsys):
    data = make_csv(tmp_path / "data", COUNT)
    whole = data.read_bytes()
    train(tmp_path, data)
    resumed = ("train", "--config", tmp_path / "run" / "config.toml", "--name", "run", "--logs", tmp_path)
    resumed += ("--resume", "latest")
    data.write_bytes(whole.replace(b"images/000", b"images/001"))
    assert command(*resumed, "--max-steps", "4") == 2
    assert "is not what the run was trained on" in capsys.readouterr().err
    data.write_bytes(whole[: whole.rstrip().rfind(b"\n") + 1])
    assert command(*resumed, "--max-steps", "4") == 2
    data.write_bytes(whole + b"images/000.jpg,one more\n")
    assert command(*resumed, "--max-steps", "4") == 0
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())[0]["count"] == COUNT + 1


def test_broken_rows_are_replaced_and_counted(tmp_path):
    pairs = write_images(tmp_path / "data", COUNT)
    path = write_table(tmp_path / "data" / "pairs.csv", [("gone.jpg", "a kite"), *pairs, (pairs[0][0], "")])
    train(tmp_path, path, batch=7)  # two steps see every row
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if '"train"' in line][-1]
    assert last["broken_no_image"] >= 1 and last["broken_empty"] >= 1


def test_what_must_be_packed_is_told_so(tmp_path):
    for data in (tmp_path, "pairs.parquet", "captions_val2017.json"):
        with pytest.raises(UserError, match=f"leanclip data pack {data} OUT"):
            open_source(str(data), DataConfig())


def test_mixing_tables_is_refused_with_the_command_that_helps(tmp_path):
    for data in ("a.csv::b.tar", "b.tar::synthetic:5"):
        with pytest.raises(UserError, match="leanclip data pack"):
            open_source(data, DataConfig())
    with pytest.raises(UserError, match="only shards can be mixed and weighted"):
        open_source("synthetic:5", DataConfig(), factors=[2.0])


def test_synthetic_data_train(tmp_path):
    assert train(tmp_path, "synthetic:1000")["train_samples"] == 1000


def test_a_table_gives_what_its_rows_say(tmp_path):
    """Quotes, separators, line breaks, blank lines, a byte order mark and either line end."""
    images = write_images(tmp_path / "images", 3)
    content = (
        "\ufefftitle;filepath;id\r\n"
        f'"a ""red"" kite;\nfar away";images/{images[0][0]};1\r\n'
        "\r\n"
        f'5" nail, ünï;images/{images[1][0]};2\n'
        f" plain ;{tmp_path / 'images' / images[2][0]};3"
    )
    path = tmp_path / "pairs.csv"
    path.write_bytes(content.encode())
    table = pickle.loads(pickle.dumps(Table(path)))
    assert [table.captions(i) for i in range(len(table))] == [
        ['a "red" kite;\nfar away'], ['5" nail, ünï'], ["plain"]
    ]  # fmt: skip
    assert [table.image_bytes(i) for i in range(3)] == [image for image, _ in bundled(3)]
    assert table.name(1) == f"row 2 of {path}"


TEXT = st.text(
    st.one_of(st.sampled_from('",;\t|\r\n\u2028 a'), st.characters(exclude_categories=["Cs"], min_codepoint=1))
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(captions=st.lists(TEXT, min_size=1, max_size=6), separator=st.sampled_from(SEPARATORS))
def test_whatever_a_csv_writer_writes_is_read_back(tmp_path, captions, separator):
    path = write_table(tmp_path / "pairs.csv", [("a.jpg", caption) for caption in captions], separator=separator)
    table = Table(path)
    assert len(table) == len(captions)
    for index, caption in enumerate(captions):
        expected = caption.replace("\r\n", "\n").replace("\r", " ").strip()
        if expected:
            assert table.captions(index) == [expected]
        else:
            with pytest.raises(BrokenSample, match="is empty"):
                table.captions(index)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=200)
    | st.lists(st.sampled_from([b'"', b",", b"\n", b"\r", b"a", b"\xff", b"\0"])).map(b"".join)
)
def test_any_bytes_are_rows_broken_rows_or_a_clear_error(tmp_path, content):
    path = tmp_path / "pairs.csv"
    path.write_bytes(b"filepath,title\n" + content)
    try:
        table = Table(path)
    except UserError:  # no rows, or a quote that is never closed
        return
    for index in range(len(table)):
        with contextlib.suppress(BrokenSample):
            assert table.captions(index)
        with pytest.raises(BrokenSample):  # there is no such image
            table.image_bytes(index)


def test_a_broken_row_costs_only_itself(tmp_path):
    images = write_images(tmp_path, 1)
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "empty.jpg").touch()
    rows = [b"filepath,title", f"{images[0][0]},good".encode(), b"gone.jpg,a kite", b"folder.jpg,a kite"]
    rows += [
        b",a kite",
        f"{images[0][0]},".encode(),
        b"000.jpg,caf\xe9",
        b"000.jpg,one,two",
        b"000.jpg",
        b"x\0.jpg,a",
    ]
    path = tmp_path / "pairs.csv"
    path.write_bytes(b"\n".join(rows) + b"\n")
    table = Table(path)
    assert len(table) == 9
    assert table.captions(0) == ["good"]
    for index, kind in enumerate(
        ["no image", "no image", "no image", "empty", "encoding", "row", "row", "no image"], 1
    ):
        with pytest.raises(BrokenSample, match=rf"row {index + 1} of ") as broken:
            assert table.captions(index) and table.image_bytes(index)
        assert broken.value.kind == kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; its first line must name the columns"),
        (b"filepath,title\n", "has a header and no rows"),
        (
            b"url,text\na,b\n",
            r"no column filepath and no title; separated by ',' its columns are url, text .*--csv-img",
        ),
        (b"filepath|text\na|b\n", "no column title; .* filepath, text"),
        ("filepath,title\na,b\n".encode("utf-16"), "not text in UTF-8"),
        (b'filepath,title\na,"b\nc,d\n', "row 1: a quote that is never closed"),
        (b'filepath,title\na,b\nc,"' + b"d\n" * 80_000, "row 2: field larger than field limit"),
    ],
)
def test_bad_tables_are_named(tmp_path, content, message):
    path = tmp_path / "pairs.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        Table(path)


def test_a_table_that_changes_under_the_run_is_noticed(tmp_path):
    table = Table(make_csv(tmp_path, 3))
    table.path.write_text("filepath,title\nimages/000.jpg,another\n")
    with pytest.raises(BrokenSample, match="has changed since") as broken:
        table.captions(0)
    assert broken.value.kind == "vanished"


def test_columns_and_separator_are_chosen_by_flags(tmp_path):
    pairs = write_images(tmp_path, 2)
    path = write_table(tmp_path / "pairs.tsv", pairs, header=("image, file", "text"), separator="\t")
    for separator in (None, "\\t", "tab", "\t"):
        config = DataConfig(csv_img_key="image, file", csv_caption_key="text", csv_separator=separator)
        assert open_source(str(path), config).captions(1) == [pairs[1][1]]
    for separator in ("::", "", '"', "\n", "→"):
        with pytest.raises(UserError, match="cannot separate columns"):
            Table(path, separator=separator)
    with pytest.raises(UserError, match="no such file"):
        open_source(str(tmp_path / "none.csv"), DataConfig())


def test_a_missing_column_ends_the_command_in_one_line(tmp_path, capsys):
    path = make_csv(tmp_path, 4)
    assert command("train", "--train-data", path, "--csv-caption-key", "caption") == 2
    line = capsys.readouterr().err.strip()
    assert "no column caption" in line and "filepath, title" in line and "\n" not in line


def test_a_table_keeps_eight_bytes_a_row(tmp_path):
    path = write_table(tmp_path / "pairs.csv", [(f"{number}.jpg", "a kite") for number in range(20_000)])
    assert len(pickle.dumps(Table(path))) < 8 * 20_000 + 1000


@pytest.mark.parametrize("form", ["", ":jpeg"])
def test_synthetic_samples_are_fixed_and_differ(form):
    source = open_source(f"synthetic:{10**12}{form}", DataConfig())
    again = pickle.loads(pickle.dumps(source))
    assert len(source) == 10**12 and len(pickle.dumps(source)) < 500
    ids = [0, 1, 64, 2**20, 10**12 - 1]
    images = [source.image_bytes(index) for index in ids]
    assert images == [again.image_bytes(index) for index in ids]
    assert len(set(images)) == len(ids)
    assert [source.captions(index) for index in ids] == [again.captions(index) for index in ids]
    with Image.open(io.BytesIO(images[-1])) as image:
        assert image.size == ((500, 375) if form else (256, 256))
        assert np.asarray(image.convert("RGB")).std() > 20


def test_synthetic_captions_are_as_long_as_captions_are():
    count, source = TokenCounter("ViT-B-32"), Synthetic(500)
    lengths = [count(source.captions(index)[0]) for index in range(500)]
    assert set(lengths) == set(range(8, 24))


@pytest.mark.parametrize("data", ["synthetic:", "synthetic:0", "synthetic:many", "synthetic:-3", "synthetic:5:png"])
def test_bad_synthetic_sizes_are_refused(data):
    with pytest.raises(UserError, match="write synthetic:N"):
        open_source(data, DataConfig())
