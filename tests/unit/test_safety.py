"""Untrusted files never run code, archives are not unpacked, and reports escape text."""

import ast
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from shard_files import picture, shard_bytes, sound

import leanclip
from leanclip.data.source import BrokenSample
from leanclip.errors import UserError
from leanclip.models import ModelConfig, create_model
from leanclip.models.untrusted import read_torch_file
from leanclip.packing.folder import Folder
from leanclip.reporting import write_report
from leanclip.reporting.report import SEARCH_PAGE
from refusal import exit_code, refusal, refuses

SOURCE = Path(leanclip.__file__).parent
SMALL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


class Payload:
    """Makes the marker directory when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def torch_zip(marker):
    content = {"epoch": 1, "state_dict": {"weight": torch.zeros(2), "x": Payload(marker)}}
    return _written(lambda file: torch.save(content, file))


def torch_old(marker):
    content = {"epoch": 1, "state_dict": {"x": Payload(marker)}}
    return _written(lambda file: torch.save(content, file, _use_new_zipfile_serialization=False))


def plain_pickle(marker):
    return pickle.dumps(Payload(marker), protocol=4)


def old_tar(marker):
    """torch's format of 2016: a tar whose members are pickles."""
    members = dict.fromkeys(("sys_info", "storages", "tensors", "pickle"), pickle.dumps(Payload(marker), protocol=2))
    return shard_bytes(members)


def script(marker):
    """A TorchScript program, whose constants are a pickle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _written(lambda file: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file))


def npy(marker):
    return _written(lambda file: np.save(file, np.array([Payload(marker)], dtype=object), allow_pickle=True))


def npz(marker):
    return _written(lambda file: np.savez(file, x=np.array([Payload(marker)], dtype=object)))


def _written(save):
    file = io.BytesIO()
    save(file)
    return file.getvalue()


KINDS = {
    "weights.pt": torch_zip, "weights.bin": torch_zip, "old.pth": torch_old, "weights.ckpt": old_tar,
    "weights.pkl": plain_pickle, "script.pt": script, "weights.npy": npy, "weights.npz": npz,
    "pickle.npz": plain_pickle, "weights.safetensors": plain_pickle, "archive.safetensors": torch_zip,
}  # fmt: skip


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "the code ran"


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.mark.parametrize("make", [torch_zip, torch_old, plain_pickle, npy, npz])
def test_the_payload_works(make, marker):
    """Otherwise the tests below could not fail."""
    content = io.BytesIO(make(marker))
    if make in (npy, npz):
        array = np.load(content, allow_pickle=True)
        _ = array["x"] if make is npz else array
    elif make is plain_pickle:
        pickle.load(content)
    else:
        torch.load(content, weights_only=False)
    assert marker.is_dir()


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_weights_never_runs_code(name, tmp_path, marker, small, capsys):
    file = tmp_path / name
    file.write_bytes(KINDS[name](marker))
    error = refusal(["export", file, tmp_path / "out.safetensors", "--model", small], capsys)
    assert name in error and not marker.exists() and not (tmp_path / "out.safetensors").exists()
    if name.endswith((".pt", ".bin", ".pth", ".pkl", ".ckpt", ".npy", ".npz")):
        assert "refused" in error
    if KINDS[name] in (torch_zip, torch_old) and not name.endswith(".safetensors"):
        assert "posix.mkdir" in error and ".safetensors" in error  # the function in it, and the remedy


TRAIN = ["train", "--recipe", "demo", "--batch-size", "16", "--max-steps", "1", "--workers", "0", "--device", "cpu"]
ENTRIES = {
    "train --pretrained": [*TRAIN, "--model", "SMALL", "--logs", "LOGS", "--pretrained", "FILE"],
    "train --resume": [*TRAIN, "--model", "SMALL", "--logs", "LOGS", "--resume", "FILE"],
    "train --pretrained DIR": [*TRAIN, "--model", "SMALL", "--logs", "LOGS", "--pretrained", "DIR"],
    "train --resume DIR": [*TRAIN, "--model", "SMALL", "--logs", "LOGS", "--resume", "DIR"],
    "train --config": ["train", "--config", "FILE", "--logs", "LOGS"],
    "train --model": ["train", "--model", "FILE.json", "--logs", "LOGS"],
    "evaluate": ["evaluate", "FILE", "--zero-shot", "emoji", "--device", "cpu"],
    "evaluate DIR": ["evaluate", "DIR", "--zero-shot", "emoji", "--device", "cpu"],
    "evaluate MODEL:FILE": ["evaluate", "SMALL:FILE", "--zero-shot", "emoji", "--device", "cpu"],
    "evaluate --suite": ["evaluate", "FULL", "--suite", "clip_benchmark", "--suite-data", "SUITE", "--device", "cpu"],
    "evaluate FULL": ["evaluate", "FULL", "--zero-shot", "emoji", "--device", "cpu"],
    "export DIR": ["export", "DIR", "OUT.safetensors"],
    "export FULL": ["export", "FULL", "OUT.safetensors"],
    "report": ["report", "DIR"],
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_entry_runs_code(entry, tmp_path, marker, small, capsys):
    """FILE is the pickle; DIR holds it under every name that some library reads; FULL is a checkpoint directory
    with the pickle instead of weights."""
    content = torch_zip(marker)
    folder, full, suite = tmp_path / "folder", tmp_path / "full", tmp_path / "suite"
    names = ("open_clip_pytorch_model.bin", "pytorch_model.bin", "model.pth", "training.pt", "epoch_1.pt", "data.pkl")
    (suite / "test").mkdir(parents=True)
    (suite / "test" / "nshards.txt").write_text("1")
    for path in (folder, full):
        path.mkdir()
        for name in names:
            (path / name).write_bytes(content)
    (full / "open_clip_model.safetensors").write_bytes(content)
    (full / "open_clip_config.json").write_text(json.dumps({"model_cfg": SMALL, "preprocess_cfg": {}}))
    file = tmp_path / "evil.pt"
    file.write_bytes(content)
    (tmp_path / "evil.pt.json").write_bytes(content)
    places = {"FILE": file, "DIR": folder, "FULL": full, "SMALL": small, "LOGS": tmp_path / "logs",
              "OUT": tmp_path / "out", "SUITE": suite}  # fmt: skip
    arguments = ENTRIES[entry]
    for word, path in places.items():
        arguments = [argument.replace(word, str(path)) for argument in arguments]
    refusal(arguments, capsys)
    assert not marker.exists()


@pytest.mark.parametrize(
    "model", [None, {}, {"text_cfg": 1, "vision_cfg": {}}, {"text_cfg": {}, "vision_cfg": {"x": 1}}, [], "pickle"]
)
def test_a_checkpoint_that_describes_no_model_is_refused(model, tmp_path):
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"")
    config = json.dumps({"model_cfg": model, "preprocess_cfg": {}}) if model is not None else "["
    (tmp_path / "open_clip_config.json").write_text(config)
    with refuses("file.bad_json" if model is None else "model.bad_config"):
        leanclip.load(tmp_path)


def test_valid_weights_are_read_with_weights_only(tmp_path, small, monkeypatch):
    """open_clip calls torch.load a second time without weights_only after a TypeError."""
    model = create_model(ModelConfig(model=str(small)))
    weights = model.clip.state_dict()
    torch.save({"state_dict": weights, "epoch": 3, "name": "x"}, tmp_path / "new.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    calls, original = [], torch.load

    def recording(*arguments, **options):
        calls.append(options.get("weights_only"))
        return original(*arguments, **options)

    monkeypatch.setattr(torch, "load", recording)
    for name in ("new.pt", "old.pt"):
        again = create_model(ModelConfig(model=str(small), pretrained=str(tmp_path / name)))
        torch.testing.assert_close(dict(again.clip.state_dict()), dict(weights), rtol=0, atol=0)
    assert len(calls) >= 4 and set(calls) == {True}

    def failing(*_, **__):
        raise TypeError("as a file can provoke it")

    monkeypatch.setattr(torch, "load", failing)
    with refuses("weights.not_weights", "new.pt"):
        read_torch_file(tmp_path / "new.pt")


@pytest.mark.parametrize("share", [0, 0.01, 0.99])
def test_a_truncated_file_is_refused(share, tmp_path, small):
    weights = create_model(ModelConfig(model=str(small))).clip.state_dict()
    save_file(weights, tmp_path / "cut.safetensors")
    torch.save(weights, tmp_path / "cut.pt")
    for path in (tmp_path / "cut.safetensors", tmp_path / "cut.pt"):
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with refuses("weights.damaged", path.name):
            create_model(ModelConfig(model=str(small), pretrained=str(path)))


def tokenizer_repository(folder, marker):
    """A local transformers repository whose tokenizer and model include code."""
    folder.mkdir()
    code = f"import pathlib\npathlib.Path({str(marker)!r}).mkdir(exist_ok=True)\n"
    (folder / "evil.py").write_text(
        code + "from transformers import PreTrainedTokenizer, PretrainedConfig\n"
        "class Tok(PreTrainedTokenizer): pass\nclass Conf(PretrainedConfig): model_type = 'evil'\n"
    )
    auto = {"AutoTokenizer": ["evil.Tok", None], "AutoConfig": "evil.Conf"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tok", "auto_map": auto}))
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    return folder


@pytest.mark.parametrize("option", ["tokenizer, trusting", "tokenizer", "text model"])
def test_a_model_config_cannot_run_code(option, tmp_path, marker, capsys, monkeypatch):
    pytest.importorskip("transformers")
    repository = tokenizer_repository(tmp_path / "repository", marker)
    text_cfg: dict[str, object] = {"hf_tokenizer_name": str(repository)}
    if option == "tokenizer, trusting":
        text_cfg["tokenizer_kwargs"] = {"trust_remote_code": True}
    if option == "text model":
        text_cfg = {"hf_model_name": str(repository), "hf_proj_type": "linear", "hf_pooler_type": "mean_pooler"}
    config = SMALL | {"text_cfg": SMALL["text_cfg"] | text_cfg}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    (tmp_path / "plain.json").write_text(json.dumps(SMALL))
    weights = create_model(ModelConfig(model=str(tmp_path / "plain.json"))).clip.state_dict()
    save_file(weights, tmp_path / "model" / "open_clip_model.safetensors")
    (tmp_path / "evil.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # the answer to the question of transformers
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for arguments in (
        [*TRAIN, "--model", tmp_path / "evil.json", "--logs", tmp_path / "logs"],
        ["evaluate", tmp_path / "model", "--zero-shot", "emoji", "--device", "cpu"],
        ["export", tmp_path / "model", tmp_path / "out.safetensors"],
    ):
        refusal(arguments, capsys)
        assert not marker.exists()


def shard_with(folder, **extra):
    folder.mkdir(exist_ok=True)
    files = sound(40)
    for ending, content in extra.items():
        files |= {f"{key}.{ending}": content for key in {name.partition(".")[0] for name in files}}
    (folder / "shard.tar").write_bytes(shard_bytes(dict(sorted(files.items()))))
    return folder / "shard.tar"


def test_pickles_in_shards_are_not_read(tmp_path, marker, small, capsys):
    evil = plain_pickle(marker)
    shard = shard_with(tmp_path / "data", pyd=evil, pkl=evil, pickle=evil, pth=torch_zip(marker), npy=npy(marker))
    data = ["--train-data", shard, "--val-data", shard, "--model", small, "--workers", "1"]
    assert exit_code(*TRAIN, *data, "--logs", tmp_path, "--name", "run") == 0
    assert exit_code("data", "check", str(shard)) == 0 and "40" in capsys.readouterr().out
    assert not marker.exists()


def test_clip_benchmark_does_not_unpickle_shards(tmp_path, marker):
    pytest.importorskip("clip_benchmark")
    evil = plain_pickle(marker)
    shard = shard_with(tmp_path / "data", pyd=evil, pkl=evil, pickle=evil, pth=torch_zip(marker), cls=b"3")
    code = (
        "import sys, webdataset as wds\n"
        "import leanclip.evaluation.clip_benchmark_main\n"
        "pil = wds.autodecode.ImageHandler('pil', extensions=['jpg'])\n"
        "sample = next(iter(wds.WebDataset(sys.argv[1], shardshuffle=False).decode(pil)))\n"
        "assert sample['cls'] == 3 and sample['jpg'].size"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(shard)], check=True)
    assert not marker.exists()
    from webdataset import autodecode

    autodecode.decoders["pyd"](evil)
    assert marker.exists()  # webdataset's own decoder runs it


LINKS = {"absolute": "/etc/hostname", "above": "../secret.txt"}


def test_archives_cannot_read_or_write_other_files(tmp_path, capsys):
    """Links, devices and names that lead outside are not followed, and nothing is unpacked."""
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:

        def add(name, content=b"", **fields):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for field, value in fields.items():
                setattr(entry, field, value)
            archive.addfile(entry, io.BytesIO(content))

        for name, content in sound(20).items():
            add(name, content)
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            for what, target in LINKS.items():
                add(f"link-{what}-{kind.decode()}.jpg", picture(1))
                add(f"link-{what}-{kind.decode()}.txt", type=kind, linkname=target)
        for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
            add(f"device-{kind.decode()}.jpg", picture(1))
            add(f"device-{kind.decode()}.txt", type=kind)
        for name in ("../out", f"{tmp_path}/out", "a/../../out"):
            add(f"{name}.jpg", picture(1))
            add(f"{name}.txt", b"out")
    (folder / "shard.tar").write_bytes(file.getvalue())
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code = exit_code("data", "check", str(folder / "shard.tar"))
    shown = capsys.readouterr().out
    assert code in (0, 1) and "secret" not in shown and "escaping path" in shown
    from leanclip.data.config import DataConfig
    from leanclip.data.datasets import open_datasets

    source = open_datasets(DataConfig(train_data=str(folder / "shard.tar"), max_broken=1.0), seed=0).train.source
    captions = [source.captions(number) for number in range(len(source))]
    assert len(captions) == 20 and not any("secret" in text or "out" in text for texts in captions for text in texts)
    assert source.broken["no caption"] == 7 and source.broken["escaping path"] == 3
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_captions_of_a_folder_may_not_be_links_outside(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    for name in ("a", "b"):
        (folder / f"{name}.jpg").write_bytes(picture(1))
    (folder / "a.txt").symlink_to("../secret.txt")
    (folder / "c.txt").write_text("fine")
    (folder / "b.txt").symlink_to("c.txt")
    found = Folder(folder)
    with pytest.raises(BrokenSample, match="outside"):
        found.captions(0)
    assert found.captions(1) == ["fine"]
    (folder / "captions.txt").symlink_to("../secret.txt")
    with pytest.raises(UserError, match="outside"):
        Folder(folder)


def test_a_parquet_file_cannot_name_images_outside_its_folder(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from leanclip.packing.parquet import Parquet

    (tmp_path / "private.jpg").write_bytes(picture(1))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.jpg").write_bytes(picture(2))
    (tmp_path / "data" / "other.jpg").write_bytes(picture(3))
    named = [str(tmp_path / "private.jpg"), "../private.jpg", "own.jpg", "x/../other.jpg"]
    rows = [{"image": {"bytes": None, "path": name}, "caption": "a picture"} for name in named]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / "train.parquet")
    found = Parquet(tmp_path / "data" / "train.parquet")
    for number in (0, 1, 3):  # the last stays inside
        with pytest.raises(BrokenSample, match="only relative paths without") as raised:
            found.image_bytes(number)
        assert raised.value.kind == "escaping path"
    assert found.image_bytes(2) == picture(2)


EVIL = "</script><script>alert(1)</script>\"'`><img src=x onerror=alert(2)>{{ 7 * 7 }}&amp;"


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.scripts, self.handlers, self.sources = 0, [], []

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.sources += [value for name, value in attrs if name in ("src", "href")]


def test_a_report_escapes_text(small_run, tmp_path):
    """With markup for every string and every unknown key in all files of a run."""
    run = tmp_path / "run"
    run.mkdir()

    def poison(value, *, keep=()):
        if isinstance(value, dict):
            return {k: v if k in keep else poison(v, keep=keep) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(item, keep=keep) for item in value]
        return EVIL if isinstance(value, str) else value

    images = ("image", "media", "kind")
    for name in ("run.json", "panel.json", "zero_shot.json"):
        (run / name).write_text(json.dumps(poison(json.loads((small_run / name).read_text()), keep=images)))
    written = (small_run / "metrics.jsonl").read_text().splitlines()
    lines: list[dict] = [poison(json.loads(line), keep=images) for line in written]  # pyright: ignore
    lines += [line | {EVIL: 1.0} for line in lines if line["kind"] == "train"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.toml").write_text(f"model = '''{EVIL.replace(chr(39), '')}'''\n")
    for runs in (run, [run, small_run]):
        html = write_report(runs, tmp_path / f"{EVIL.replace('/', '')}.html").read_text()
        page = _Page()
        page.feed(html)
        assert page.scripts == 1 and page.handlers == []
        local = re.compile(rf"data:.*|#[a-z-]+|{re.escape(SEARCH_PAGE)}(#text=[\w.~%-]*)?", re.ASCII)
        assert all(local.fullmatch(str(source)) for source in page.sources)
        assert "<img src=x" not in html and "49" not in html.partition("alert(2)&gt;")[2][:20]


FORBIDDEN = {"eval", "exec", "__import__", "compile"}
FORBIDDEN_ATTRIBUTES = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.hub", "os.system", "os.popen", "np.fromregex",
    "archive.extractall", "archive.extract", "shutil.unpack_archive", "joblib.load", "yaml.load", "marshal.loads",
    "shelve.open", "torch.jit",
}  # fmt: skip


def test_the_source_never_runs_foreign_code():
    """Every torch.load has weights_only=True, no np.load allows pickles; no shell, no eval."""
    loads = 0
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in FORBIDDEN_ATTRIBUTES, where
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert name not in FORBIDDEN, where
            assert options.get("shell", "False") == "False", where
            assert options.get("trust_remote_code", "False") == "False", where
            assert options.get("allow_pickle", "False") == "False", where
            if name == "torch.load" or (name.endswith("load_checkpoint") and name.startswith("open_clip")):
                loads += 1
                assert options["weights_only"] == "True", where
    assert loads >= 2
