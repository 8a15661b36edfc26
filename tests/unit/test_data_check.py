"""What `leanclip data check` finds, against data made to hold it."""

import io
import json
import tarfile

import pytest
from data_forms import bundled, make_csv, write_images, write_table
from in_workers import count_words
from PIL import Image

from leanclip.cli import main
from leanclip.data import DataConfig, open_source
from leanclip.data.synthetic import Synthetic
from leanclip.models import TokenCounter
from leanclip.packing.check import check


def command(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["data", "check", *(str(argument) for argument in arguments), "--workers", "1"])
    return stop.value.code


def look(data, **options):
    source = open_source(str(data), DataConfig())
    return check(source, **({"count_tokens": count_words, "context_length": 4} | options))


def write_shard(path, samples):
    with tarfile.open(path, "w") as archive:
        for name, content in samples.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def picture(width, height, kind="PNG"):
    file = io.BytesIO()
    Image.effect_noise((width, height), 50).convert("RGB").save(file, kind)
    return file.getvalue()


def test_shards_are_measured(tmp_path):
    wide, tall = picture(40, 20), picture(20, 60, "JPEG")
    several = json.dumps({"captions": ["one two three four five", "one", " "]}).encode()
    samples = {
        "1.png": wide, "1.txt": b"one two",
        "2.jpg": tall, "2.json": several,
        "3.png": wide, "3.txt": b"one two three",
        "4.png": picture(30, 30), "4.txt": b"one two",
        "5.jpg": tall[: len(tall) // 2], "5.txt": b"x",
        "6.png": b"", "6.txt": b"x",
        "7.png": wide, "7.txt": b" ",
        "8.png": wide, "8.txt": b"caf\xe9",
        "9.png": wide,
    }  # fmt: skip
    found = look(write_shard(tmp_path / "a.tar", samples))
    assert found["samples"] == found["checked"] == 8
    assert found["broken"] == {"empty": 2, "image": 1, "encoding": 1}
    assert found["left_out_on_opening"] == {"no caption": 1}
    assert found["broken_share"] == 5 / 9
    assert found["empty_captions"] == 1
    assert found["image_formats"] == {"PNG": 3, "JPEG": 1}
    assert found["image_width"] == {"min": 20, "median": 35, "max": 40}
    assert found["image_height"] == {"min": 20, "median": 25, "max": 60}
    assert found["captions"] == 5 and found["captions_per_image"] == {"min": 1, "median": 1, "max": 2}
    assert found["tokens"] == {"min": 1, "median": 2, "max": 5}
    assert (found["longer_than_context"], found["longer_than_context_share"]) == (1, 0.2)
    assert found["duplicate_images"]["count"] == 1
    assert found["duplicate_images"]["examples"] == [f"3 of {tmp_path}/a.tar is as 1 of {tmp_path}/a.tar"]
    assert found["duplicate_captions"]["count"] == 1
    assert "sample 5 of " in found["broken_examples"]["image"][0]


def test_the_same_is_found_by_several_processes(tmp_path):
    pairs = write_images(tmp_path, 8)
    rows = [pairs[number % 8] for number in range(2000)]
    rows[3], rows[1700], rows[900] = ("gone.jpg", "a"), ("lost.jpg", "a"), (pairs[0][0], " ")
    path = write_table(tmp_path / "pairs.csv", rows)
    counted = []
    alone, together = look(path, progress=counted.append), look(path, workers=2)
    assert alone == together
    assert sum(counted) == 2000
    assert alone["duplicate_images"]["count"] == 2000 - 3 - 8
    assert [message.partition(":")[0] for message in alone["broken_examples"]["no image"]] == [
        f"row 4 of {path}", f"row 1701 of {path}"
    ]  # fmt: skip


def test_a_sample_of_a_large_set_is_enough_to_look_at():
    found = check(Synthetic(10**9), count_tokens=count_words, context_length=77, sample=50)
    assert found["samples"] == 10**9 and found["checked"] == found["captions"] == 50
    assert found["tokens"]["min"] >= 6 and found["tokens"]["max"] <= 21
    assert found == check(Synthetic(10**9), count_tokens=count_words, context_length=77, sample=50)


def test_nothing_whole_is_no_error_of_ours(tmp_path):
    path = write_table(tmp_path / "pairs.csv", [("gone.jpg", "a")])
    found = look(path)
    assert found["broken_share"] == 1 and found["tokens"] == {} and found["captions"] == 0
    assert command(path) == 1


def test_the_command_shows_a_table_and_writes_json(tmp_path, capsys):
    path = make_csv(tmp_path, 10)
    assert command(path, "--json", tmp_path / "check.json") == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["samples"] == 10 and found["broken"] == {} and found["model"] == "ViT-B-32"
    count = TokenCounter("ViT-B-32")
    lengths = [count(caption) for _, caption in bundled(10)]
    assert found["tokens"]["min"] == min(lengths) and found["tokens"]["max"] == max(lengths)
    for text in ("samples", "caption length", "longer than 77 tokens", "images there before", "broken in all"):
        assert text in shown


def test_the_exit_code_is_1_above_the_threshold(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # so that no long path is cut
    pairs = write_images(tmp_path, 9)
    path = write_table(tmp_path / "pairs.tsv", [*pairs, ("[gone].jpg", "a kite")], separator="\t")
    assert command(path) == 1
    captured = capsys.readouterr()
    assert "10.0% of the samples are broken, more than --threshold 1.0%" in captured.err
    assert "[gone].jpg" in "".join(captured.out.split())
    assert command(path, "--threshold", "0.1") == 0


def test_tokens_are_counted_as_the_tokenizer_of_the_model_does():
    count = TokenCounter("leanclip-tiny")
    text = "a photo of a very small cat, perhaps"
    from leanclip.models import ModelConfig, create_model

    model = create_model(ModelConfig(model="leanclip-tiny"))
    assert count(text) == int((model.tokenizer([text])[0] != 0).sum())
    assert count(text * 50) > count.context_length == model.tokenizer([text]).shape[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.tar"], "no such file or folder: gone.tar"),
        (["gone.csv"], "no such file: gone.csv"),
        (["synthetic:5", "--sample", "0"], "--sample is 0"),
        (["synthetic:5", "--model", "ViT-Z"], "unknown model"),
        (["synthetic:5", "--json", "no/where.json"], "cannot write no/where.json"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--help"], 0), (["unpack"], 2)])
def test_the_two_commands_are_told(arguments, code, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["data", *arguments])
    assert stop.value.code == code
    captured = capsys.readouterr()
    assert "data pack" in captured.out + captured.err and "data check" in captured.out + captured.err
