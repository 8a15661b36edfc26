"""Writes the golden run's loss curves, and its initial weights where there are none.

Run only when the algorithm changes on purpose:

python tests/golden/make_golden.py
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from leanclip.cli import main
from leanclip.models import ModelConfig, create_model

HERE = Path(__file__).parent
MODEL, WEIGHTS, CURVES = HERE / "model.json", HERE / "initial.safetensors", HERE / "curves.json"
LOSSES = ("infonce", "siglip", "fastclip-v3")


OWN = {"siglip": " --bias 0", "fastclip-v3": " --lr-tau 2e-4"}


def golden_arguments(loss: str, logs: Path) -> list[str]:
    return (
        f"train --model {MODEL} --pretrained {WEIGHTS} --loss {loss} --tau 0.07 --precision fp64 --max-steps 20"
        " --epochs 4 --batch-size 32 --lr 1e-2 --warmup 4 --workers 0 --aug-scale 0.5 1 --log-every 1"
        f" --eval-every 0 --device cpu --logs {logs} --name {loss}{OWN.get(loss, '')}"
    ).split()


def curve(loss: str, logs: Path) -> list[float]:
    """The losses of the golden command."""
    with contextlib.suppress(SystemExit):  # a failed run leaves no metrics to read
        main(golden_arguments(loss, logs))
    lines = [json.loads(line) for line in (logs / loss / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def make() -> None:
    if not WEIGHTS.exists():  # other weights would hide whether anything else changed
        torch.manual_seed(0)
        model = create_model(ModelConfig(model=str(MODEL)))
        # Half precision halves the file; the run starts from exactly these numbers in float64.
        save_file({name: value.half() for name, value in model.clip.state_dict().items()}, WEIGHTS)
    with tempfile.TemporaryDirectory() as logs:
        CURVES.write_text(json.dumps({loss: curve(loss, Path(logs)) for loss in LOSSES}, indent=1))


if __name__ == "__main__":
    sys.exit(make())
