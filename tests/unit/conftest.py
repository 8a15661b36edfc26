import json

import pytest

SMALL = {
    "embed_dim": 48,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 1},
}


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """A run on the bundled emoji that has just begun to learn: its model tells images and texts apart."""
    from leanclip.cli import main

    logs = tmp_path_factory.mktemp("logs")
    (logs / "small.json").write_text(json.dumps(SMALL))
    flags = ["--model", str(logs / "small.json"), "--batch-size", "32", "--max-steps", "15", "--eval-every", "0"]
    with pytest.raises(SystemExit) as stop:
        main(["train", "--recipe", "demo", "--name", "small", "--logs", str(logs), "--workers", "0",
              "--device", "cpu", *flags])  # fmt: skip
    assert stop.value.code == 0
    return logs / "small"
