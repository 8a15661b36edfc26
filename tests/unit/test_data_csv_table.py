"""Training on tables and synthetic data directly, and on every other form after packing."""

import contextlib
import io
import json
import math
import pickle

import numpy as np
import pytest
from data_forms import PACKABLE, bundled, make_csv, write_images, write_table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from leanclip.data import BrokenSample, DataConfig, Shards, open_source
from leanclip.data.csv_table import SEPARATORS, Table
from leanclip.data.synthetic import Synthetic
from leanclip.errors import UserError
from leanclip.models import TokenCounter
from leanclip.packing.folder import Folder
from refusal import assert_refused, exit_code, refuses
from run_records import losses, records

COUNT = 12


def train(logs, data, *more, batch=4):
    flags = "--model leanclip-tiny --max-steps 3 --log-every 1 --eval-every 0 --workers 0".split()
    flags += ["--batch-size", batch, "--logs", logs, "--name", "run"]
    assert exit_code("train", *flags, "--train-data", data, *more) == 0
    logged = losses(logs / "run")
    assert len(logged) == 3 and all(map(math.isfinite, logged))
    return json.loads((logs / "run" / "run.json").read_text())


@pytest.mark.parametrize("form", ["csv", "tsv", "synthetic"])
def test_tables_and_synthetic_data_train_directly(form, tmp_path):
    data = f"synthetic:{COUNT}" if form == "synthetic" else PACKABLE[form](tmp_path / "data", COUNT)
    assert train(tmp_path / "logs", data)["train_samples"] == COUNT


def test_weights_and_groups_of_a_table_reach_the_loss(tmp_path, capsys):
    """A weight of 0 for all: nothing is learned, and the loss is 0."""
    write_images(tmp_path, COUNT)
    rows = [f"{path.name},picture,{0},{path.stem}" for path in sorted(tmp_path.glob("*.jpg"))]
    (tmp_path / "pairs.csv").write_text("\n".join(["filepath,title,quality,product", *rows]))
    more = ["--pair-weights", "quality", "--group-key", "product", "--loss", "infonce"]
    train(tmp_path / "logs", tmp_path / "pairs.csv", *more)
    assert set(losses(tmp_path / "logs/run")) == {0.0}
    assert exit_code("train", "--train-data", tmp_path / "pairs.csv", "--logs", tmp_path / "logs", "--batch-size", 4,
                     "--model", "leanclip-tiny", "--workers", 0, "--pair-weights", "qualty") == 2  # fmt: skip
    assert "no column qualty" in capsys.readouterr().err


@pytest.mark.parametrize("form", PACKABLE)
def test_every_form_packs_to_the_same_images_and_trains(form, tmp_path):
    data, shards = PACKABLE[form](tmp_path / "data", COUNT), tmp_path / "shards"
    assert exit_code("data", "pack", data, shards, "--samples-per-shard", "5", "--workers", "1") == 0
    assert sorted(path.name for path in shards.iterdir()) == ["00000.tar", "00001.tar", "00002.tar", "pack.jsonl"]
    packed = Shards(str(shards))
    found = {packed.image_bytes(i): packed.captions(i) for i in range(len(packed))}
    for image, caption in bundled(COUNT):
        captions = found.pop(image)
        assert all(text.startswith(caption) for text in captions)
        assert len(captions) == {"parquet of Hugging Face": 2, "folder with captions.txt": 3, "coco": 2}.get(form, 1)
    assert not found
    assert train(tmp_path / "logs", shards)["train_samples"] == COUNT


def test_a_run_resumes_with_added_rows_and_not_with_changed_ones(tmp_path, capsys):
    data = make_csv(tmp_path / "data", COUNT)
    content = data.read_bytes()
    train(tmp_path, data)
    resumed = ("train", "--config", tmp_path / "run" / "config.toml", "--name", "run", "--logs", tmp_path)
    resumed += ("--resume", "latest", "--max-steps", "4")
    for changed in (content.replace(b"images/000", b"images/001"), content[: content.rstrip().rfind(b"\n") + 1]):
        data.write_bytes(changed)
        assert_refused("data.changed", resumed, capsys)
    (tmp_path / "data" / "images" / "new.jpg").hardlink_to(tmp_path / "data" / "images" / "000.jpg")
    data.write_bytes(content + b"images/000.jpg,one more\nimages/new.jpg,one more\n")
    assert exit_code(*resumed) == 0
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())[0]["count"] == COUNT + 1


def test_broken_rows_are_replaced_and_counted(tmp_path):
    pairs = write_images(tmp_path / "data", COUNT)
    path = write_table(tmp_path / "data" / "pairs.csv", [("gone.jpg", "a kite"), *pairs, ("none.jpg", "")])
    train(tmp_path, path, batch=7)  # two steps see every row
    last = records(tmp_path / "run", "train")[-1]
    assert last["broken_no_image"] >= 1 and last["broken_empty"] >= 1


@pytest.mark.parametrize(
    ("data", "factors", "code"),
    [
        ("folder", None, "data.not_packed"),
        ("pairs.parquet", None, "data.not_packed"),
        ("captions_val2017.json", None, "data.not_packed"),
        ("a.csv::b.tar", None, "data.mixed_sources"),
        ("b.tar::synthetic:5", None, "data.mixed_sources"),
        ("synthetic:5", [2.0], "data.mixed_sources"),
    ],
)
def test_the_error_for_data_to_pack_names_the_command(tmp_path, monkeypatch, data, factors, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with refuses(code, "leanclip data pack"):
        open_source(data, DataConfig(), factors=factors)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("none.csv", "data.not_found"),
        *((f"synthetic:{size}", "data.bad_synthetic") for size in ("", "0", "many", "-3", "5:png", "9" * 400)),
    ],
)
def test_unusable_sources_are_refused(data, code):
    with refuses(code, data):
        open_source(data, DataConfig())


def test_quotes_separators_line_breaks_blank_lines_and_byte_order_marks_are_read(tmp_path):
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
def test_tables_of_the_csv_module_are_read_back(tmp_path, captions, separator):
    path = write_table(
        tmp_path / "pairs.csv",
        [(f"{number}.jpg", caption) for number, caption in enumerate(captions)],
        separator=separator,
    )
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
    except UserError:  # no rows, or a quote is never closed
        return
    for index in range(len(table)):
        with contextlib.suppress(BrokenSample):
            assert table.captions(index)
        with pytest.raises(BrokenSample):  # the image does not exist
            table.image_bytes(index)


def test_a_broken_row_does_not_affect_others(tmp_path):
    write_images(tmp_path, 1)
    (tmp_path / "folder.jpg").mkdir()
    rows = {
        b"gone.jpg,a kite": "no image",
        b"folder.jpg,a kite": "no image",
        b",a kite": "no image",
        b"1.jpg,": "empty",
        b"2.jpg,caf\xe9": "encoding",
        b"000.jpg,one,two": "row",
        b"000.jpg": "row",
        b"x\0.jpg,a": "no image",
    }
    (tmp_path / "pairs.csv").write_bytes(b"\n".join([b"filepath,title", b"000.jpg,good", *rows]) + b"\n")
    table = Table(tmp_path / "pairs.csv")
    assert len(table) == 9 and table.captions(0) == ["good"]
    for index, kind in enumerate(rows.values(), 1):
        with pytest.raises(BrokenSample, match=rf"row {index + 1} of ") as broken:
            assert table.captions(index) and table.image_bytes(index)
        assert broken.value.kind == kind


@pytest.mark.parametrize(
    ("row", "broken"),
    [
        (b'1.jpg,"a dog\n', 1),  # a quote that is never closed
        (b'1.jpg,"a dog\n2.jpg,a cat\n3.jpg,"a ""good"" bird"\n', 1),  # the next quote closes it
        (b"1.jpg," + b"a dog " * 40_000 + b"\n", 1),
        (b'1.jpg,"' + b"a dog " * 40_000 + b'"\n', 1),
        (b'1.jpg,"a dog" on a leash\n', 0),
        ("1.jpg,a dog\u2028on a leash\u2029\x85 \x0b\x0c\x1c\n".encode(), 0),
        (b'1.jpg,"a dog\non a leash"\n', 0),
    ],
)
def test_a_row_takes_no_other_row_with_it(tmp_path, row, broken):
    other = [(f"other {number}.jpg", f"caption {number}") for number in range(50)]
    path = write_table(tmp_path / "pairs.csv", other)
    start = path.read_bytes()
    path.write_bytes(start + row + start.partition(b"\n")[2].replace(b"other", b"later"))
    table, kinds, captions = Table(path), [], []
    for index in range(len(table)):
        try:
            captions += table.captions(index)
        except BrokenSample as error:
            kinds.append(error.kind)
    assert kinds == ["row"] * broken
    assert [caption for caption in captions if caption.startswith("caption")] == [text for _, text in other] * 2
    assert len(captions) + broken == 100 + row.count(b".jpg")


def test_the_lists_of_a_folder_lose_no_row(tmp_path):
    write_images(tmp_path, 4)
    content = '000.jpg,"a dog\n001.jpg,a\u2028cat\n002.jpg,"a ""good"" bird"\n003.jpg,' + "long " * 40_000 + "\n"
    (tmp_path / "captions.csv").write_text("image,caption\n" + content, encoding="utf-8")
    folder = Folder(tmp_path)
    captions, broken = {}, []
    for index in range(len(folder)):
        try:
            captions[folder.name(index)[:7]] = folder.captions(index)
        except BrokenSample as error:
            broken.append(str(error))
    assert captions == {"001.jpg": ["a\u2028cat"], "002.jpg": ['a "good" bird']}
    assert [message for message in broken if message.startswith("row ")] == [
        f"row {row} of captions.csv in {tmp_path} has no caption" for row in (1, 4)
    ]


@pytest.mark.parametrize(
    ("content", "code", "value"),
    [
        (b"", "data.no_samples", "empty"),
        (b"filepath,title\n", "data.no_samples", "header"),
        (b"url,text\na,b\n", "data.missing_column", "filepath and no title"),
        (b"filepath|text\na|b\n", "data.missing_column", "filepath, text"),
        ("filepath,title\na,b\n".encode("utf-16"), "data.not_utf8", "iconv"),
    ],
)
def test_invalid_tables_are_refused(tmp_path, content, code, value):
    (tmp_path / "pairs.csv").write_bytes(content)
    with refuses(code, "pairs.csv", value):
        Table(tmp_path / "pairs.csv")


def test_a_table_that_changes_during_a_run_is_detected(tmp_path):
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
        with refuses("data.bad_separator", repr(separator)):
            Table(path, separator=separator)


def test_a_table_takes_eight_bytes_per_row(tmp_path):
    path = write_table(tmp_path / "pairs.csv", [(f"{number}.jpg", "a kite") for number in range(20_000)])
    assert len(pickle.dumps(Table(path))) < 8 * 20_000 + 1000


@pytest.mark.parametrize("form", ["", ":jpeg"])
def test_synthetic_samples_are_fixed_and_differ(form):
    source = open_source(f"synthetic:{10**9 - 1}{form}", DataConfig())
    again = pickle.loads(pickle.dumps(source))
    assert len(source) == 10**9 - 1 and len(pickle.dumps(source)) < 500
    ids = [0, 1, 64, 2**20, 10**9 - 2]
    images = [source.image_bytes(index) for index in ids]
    assert images == [again.image_bytes(index) for index in ids]
    assert len(set(images)) == len(ids)
    assert [source.captions(index) for index in ids] == [again.captions(index) for index in ids]
    with Image.open(io.BytesIO(images[-1])) as image:
        assert image.size == ((500, 375) if form else (256, 256))
        assert np.asarray(image.convert("RGB")).std() > 20


def test_synthetic_captions_have_8_to_23_tokens():
    count, source = TokenCounter("ViT-B-32"), Synthetic(500)
    lengths = [count(source.captions(index)[0]) for index in range(500)]
    assert set(lengths) == set(range(8, 24))
