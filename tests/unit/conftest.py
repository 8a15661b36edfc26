import json
import shutil

import pytest
import torch
from checkpoint_runs import SMALL, train

from refusal import exit_code


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """A run on the bundled emoji that has just begun to learn: its model tells images and texts apart."""
    logs = tmp_path_factory.mktemp("logs")
    (logs / "small.json").write_text(json.dumps(SMALL))
    flags = ["--model", str(logs / "small.json"), "--batch-size", "32", "--max-steps", "15", "--eval-every", "0"]
    flags += ["--logs", logs, "--workers", 0, "--device", "cpu"]
    assert exit_code("train", "--recipe", "demo", "--name", "small", *flags) == 0
    return logs / "small"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A vision transformer and a text tower of two blocks each."""
    path = tmp_path_factory.mktemp("model") / "small.json"
    vision = {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16}
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2}
    path.write_text(json.dumps({"embed_dim": 64, "vision_cfg": vision, "text_cfg": text}))
    return str(path)


@pytest.fixture(scope="session")
def eight_steps(tmp_path_factory):
    """A folder with a run that is over, with checkpoints after every second step (checkpoint_runs.py). Not to be
    changed: `run` is a copy."""
    folder = tmp_path_factory.mktemp("eight_steps")
    assert train(folder) == 0
    return folder


@pytest.fixture
def run(eight_steps, tmp_path):
    shutil.copytree(eight_steps / "logs", tmp_path / "logs", symlinks=True)
    shutil.copy(eight_steps / "tiny.json", tmp_path / "tiny.json")
    return tmp_path


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A small BERT with its tokenizer, as transformers saves them."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "red", "two", *map(chr, range(97, 123))]
    (directory / "vocab.txt").write_text("\n".join(dict.fromkeys(words)))
    transformers.BertTokenizerFast(vocab=str(directory / "vocab.txt")).save_pretrained(directory)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=24,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(directory)
    return directory


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """Hugging Face's cache without a network. Returns a function that makes the directory of a repository in it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def snapshot(owner, name):
        repository = tmp_path / "hub" / f"models--{owner}--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
        return repository / "snapshots" / ("0" * 40)

    return snapshot
