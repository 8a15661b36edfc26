"""The report of `leanclip data check` on data with known defects."""

import json

import pyarrow
import pytest
from data_forms import bundled, make_csv, write_images, write_table
from in_workers import count_words
from pyarrow import parquet
from shard_files import picture, write_shard

from leanclip.data import DataConfig, Shards, open_source
from leanclip.data.csv_table import Table
from leanclip.data.synthetic import Synthetic
from leanclip.models import TokenCounter
from leanclip.packing.check import check
from leanclip.packing.coco import Coco
from leanclip.packing.folder import Folder
from leanclip.packing.pack import PackConfig, pack
from leanclip.packing.parquet import Parquet
from refusal import assert_refused, exit_code


def command(*arguments):
    return exit_code("data", "check", *arguments, "--workers", "1")


def report_on(data, **options):
    source = open_source(str(data), DataConfig())
    return check(source, **({"count_tokens": count_words, "context_length": 4} | options))


def test_shards_are_measured(tmp_path):
    wide, tall = picture(1, (40, 20), "PNG"), picture(2, (20, 60))
    several = json.dumps({"captions": ["one two three four five", "one", " "]}).encode()
    samples = {
        "1.png": wide, "1.txt": b"one two",
        "2.jpg": tall, "2.json": several,
        "3.png": wide, "3.txt": b"one two three",
        "4.png": picture(3, (30, 30), "PNG"), "4.txt": b"one two",
        "5.jpg": tall[: len(tall) // 2], "5.txt": b"x",
        "6.png": b"", "6.txt": b"x",
        "7.png": wide, "7.txt": b" ",
        "8.png": wide, "8.txt": b"caf\xe9",
        "9.png": wide,
    }  # fmt: skip
    report = report_on(write_shard(tmp_path / "a.tar", samples))
    assert "sample 5 of " in report["broken_examples"]["image"][0]
    duplicate = report["duplicate_images"]
    assert duplicate["count"] == report["duplicate_captions"]["count"] == 1
    assert duplicate["examples"] == [f"3 of {tmp_path}/a.tar duplicates 1 of {tmp_path}/a.tar"]
    assert " has a caption of " in report["duplicate_captions"]["examples"][0]
    expected = {
        "samples": 8,
        "checked": 8,
        "broken": {"empty": 2, "image": 1, "encoding": 1},
        "left_out_on_opening": {"no caption": 1},
        "broken_share": 5 / 9,
        "empty_captions": 2,  # of samples 2, which has others, and 7
        "image_formats": {"PNG": 3, "JPEG": 1},
        "image_width": {"min": 20, "median": 35, "max": 40},
        "image_height": {"min": 20, "median": 25, "max": 60},
        "captions": 5,
        "captions_per_image": {"min": 1, "median": 1, "max": 2},
        "tokens": {"min": 1, "median": 2, "max": 5},
        "longer_than_context": 1,
        "longer_than_context_share": 0.2,
    }
    assert {name: report[name] for name in expected} == expected


@pytest.mark.parametrize("form", ["csv", "shard", "list", "parquet", "coco"])
def test_empty_captions_beside_others_are_counted(form, tmp_path):
    """Sample 0 has a caption and three empty ones, sample 1 two empty ones, sample 2 one caption."""
    texts = {"0.png": ["", "a thing", " ", ""], "1.png": ["", " "], "2.png": ["another"]}
    images = {name: picture(number, (40, 20), "PNG") for number, name in enumerate(texts)}
    for name, content in images.items():
        (tmp_path / name).write_bytes(content)
    rows = [(name, caption) for name, captions in texts.items() for caption in captions]
    if form == "csv":
        source = Table(write_table(tmp_path / "pairs.csv", rows))
    elif form == "shard":
        captions = {name.replace("png", "json"): json.dumps({"captions": texts[name]}).encode() for name in texts}
        source = Shards(str(write_shard(tmp_path / "a.tar", images | captions)))
    elif form == "list":
        lines = [json.dumps({"file_name": name, "caption": caption}) for name, caption in rows]
        (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
        source = Folder(tmp_path)
    elif form == "parquet":
        columns = {"image": list(images.values()), "caption": list(texts.values())}
        parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
        source = Parquet(tmp_path / "pairs.parquet")
    else:
        listed = [{"id": number, "file_name": name} for number, name in enumerate(images)]
        annotations = [{"image_id": int(name[0]), "caption": caption} for name, caption in rows]
        (tmp_path / "coco.json").write_text(json.dumps({"images": listed, "annotations": annotations}))
        source = Coco(tmp_path / "coco.json")
    report = check(source, count_tokens=count_words, context_length=4)
    assert (report["empty_captions"], report["broken"], report["captions"]) == (5, {"empty": 1}, 2)


def test_lines_of_pixels_are_counted(tmp_path):
    samples = {
        "1.png": picture(1, (40, 20), "PNG"),
        "1.txt": b"one",
        "2.png": picture(2, (9000, 1), "PNG"),
        "2.txt": b"two",
    }
    report = report_on(write_shard(tmp_path / "a.tar", samples))
    assert report["broken"] == {"aspect ratio": 1} and "sample 2 of" in report["broken_examples"]["aspect ratio"][0]


def test_several_processes_give_the_same_report(tmp_path):
    pairs = write_images(tmp_path, 8)
    rows = [(f"{number}.jpg", pairs[number % 8][1]) for number in range(2000)]
    for number, (name, _) in enumerate(rows):
        (tmp_path / name).hardlink_to(tmp_path / pairs[number % 8][0])
    rows[3], rows[1700], rows[900] = ("gone.jpg", "a"), ("lost.jpg", "a"), ("900.jpg", " ")
    path = write_table(tmp_path / "pairs.csv", rows)
    counted = []
    alone, together = report_on(path, progress=counted.append), report_on(path, workers=2)
    assert alone == together
    assert sum(counted) == 2000
    assert alone["duplicate_images"]["count"] == 2000 - 3 - 8
    assert [message.partition(":")[0] for message in alone["broken_examples"]["no image"]] == [
        f"row 4 of {path}", f"row 1701 of {path}"
    ]  # fmt: skip


def test_a_random_sample_of_a_large_set_is_checked():
    report = check(Synthetic(10**9), count_tokens=count_words, context_length=77, sample=50)
    assert report["samples"] == 10**9 and report["checked"] == report["captions"] == 50
    assert report["tokens"]["min"] >= 6 and report["tokens"]["max"] <= 21
    assert report == check(Synthetic(10**9), count_tokens=count_words, context_length=77, sample=50)


def test_the_effect_of_resizing_is_estimated(tmp_path, capsys):
    report = check(Synthetic(64, jpeg=True), count_tokens=count_words, context_length=77)
    found = report["resizing"]
    assert found["larger"] == 64 and found["encoded"] == 4 and found["bytes"] > found["bytes_resized"]
    assert found["pixels_left"] == pytest.approx((256 / 375) ** 2)
    pack(Synthetic(64, jpeg=True), tmp_path, PackConfig(resize=256))
    packed = Shards(str(tmp_path)).image_sizes()
    assert found["bytes_resized"] == pytest.approx(packed.sum(), rel=0.1)
    assert command(tmp_path) == 0 and command("synthetic:64:jpeg") == 0
    small, large = (line for line in capsys.readouterr().out.splitlines() if "larger than 256 pixels" in line)
    assert small.endswith(" 0 (0.0%)") and "64 (100.0%); data pack --resize 256" in large


def test_a_set_without_a_good_sample_is_reported(tmp_path):
    path = write_table(tmp_path / "pairs.csv", [("gone.jpg", "a")])
    report = report_on(path)
    assert report["broken_share"] == 1 and report["tokens"] == {} and report["captions"] == 0
    assert command(path) == 1


def test_the_command_shows_a_table_and_writes_json(tmp_path, capsys):
    path = make_csv(tmp_path, 10)
    assert command(path, "--json", tmp_path / "check.json") == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["samples"] == 10 and report["broken"] == {} and report["model"] == "ViT-B-32"
    count = TokenCounter("ViT-B-32")
    lengths = [count(caption) for _, caption in bundled(10)]
    assert report["tokens"]["min"] == min(lengths) and report["tokens"]["max"] == max(lengths)
    for text in ("samples", "caption length", "longer than 77 tokens", "duplicate images", "broken in all"):
        assert text in shown


def test_the_exit_code_is_1_above_the_threshold(tmp_path, capsys):
    pairs = write_images(tmp_path, 9)
    path = write_table(tmp_path / "pairs.tsv", [*pairs, ("[gone].jpg", "a kite")], separator="\t")
    assert command(path) == 1
    captured = capsys.readouterr()
    assert "10.0% of the samples are broken, more than --threshold 1.0%" in captured.err
    assert "[gone].jpg" in captured.out
    assert command(path, "--threshold", "0.1") == 0


def test_the_tokenizer_of_the_model_counts_the_tokens():
    count = TokenCounter("leanclip-tiny")
    text = "a photo of a very small cat, perhaps"
    from leanclip.models import ModelConfig, create_model

    model = create_model(ModelConfig(model="leanclip-tiny"))
    assert count(text) == int((model.tokenizer([text])[0] != 0).sum())
    assert count(text * 50) > count.context_length == model.tokenizer([text]).shape[1]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("gone.tar", "data.not_found"),
        ("gone.csv", "data.not_found"),
        ("synthetic:5 --sample 0", "data.bad_value"),
        ("synthetic:5 --model ViT-Z", "model.unknown"),
        ("synthetic:5 --json no/where.json", "data.cannot_write"),
    ],
)
def test_user_errors_are_one_line(tmp_path, monkeypatch, capsys, arguments, code):
    monkeypatch.chdir(tmp_path)
    assert_refused(code, ["data", "check", *arguments.split()], capsys)


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--help"], 0), (["unpack"], 2)])
def test_the_overview_names_both_commands(arguments, code, capsys):
    assert exit_code("data", *arguments) == code
    captured = capsys.readouterr()
    assert "data pack" in captured.out + captured.err and "data check" in captured.out + captured.err
