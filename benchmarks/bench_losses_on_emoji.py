"""Every loss on the bundled emoji with the demo's settings: the recall of each after the same number of steps.

    python benchmarks/bench_losses_on_emoji.py            # all eight, about ten minutes on 2 cores
    python benchmarks/bench_losses_on_emoji.py --quick    # a few steps of each

The figures measure unseen renders of known concepts. One seed and no tuning per loss: this shows that the losses
work, not which is better.
"""

import argparse
import csv
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import leanclip

RESULTS = Path(__file__).parent / "results" / "losses_on_emoji.csv"


def measure(loss: str, logs: Path, extra: list[str]) -> dict[str, float | int | str]:
    """Train one run in a process of its own and read its last evaluation."""
    command = [sys.executable, "-m", "leanclip", "train", "--recipe", "demo", "--loss", loss, "--name", loss]
    began = time.perf_counter()
    subprocess.run([*command, "--logs", str(logs), *extra], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (logs / loss / "metrics.jsonl").read_text().splitlines()]
    figures = [line for line in lines if line["kind"] == "eval" and line["set"] == "val"][-1]
    tau = [line["tau"] for line in lines if line["kind"] == "train"][-1]
    recalls = {name: figures["metrics"][f"{name}_recall@10"] for name in ("text_to_image", "image_to_text")}
    return {"loss": loss, "steps": figures["step"], **recalls, "tau": tau, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three steps of each loss, results not stored")
    parser.add_argument("--loss", nargs="*", default=list(leanclip.LOSSES))
    arguments = parser.parse_args()
    extra = ["--max-steps", "3", "--batch-size", "16", "--warmup", "0"] if arguments.quick else []
    rows = []
    print(f"{'loss':<14}{'steps':>6}{'text-to-image':>15}{'image-to-text':>15}{'tau':>8}{'seconds':>9}   recall@10")
    with tempfile.TemporaryDirectory() as logs:
        for loss in arguments.loss:
            row = measure(loss, Path(logs), extra)
            rows.append(row)
            print(f"{row['loss']:<14}{row['steps']:>6}{row['text_to_image']:>15.1%}{row['image_to_text']:>15.1%}"
                  f"{row['tau']:>8.4f}{row['seconds']:>9}", flush=True)  # fmt: skip
    print("unseen renders of known concepts; chance 5.0%")
    if arguments.quick:
        return
    provenance = {
        "version": leanclip.__version__,
        "torch": torch.__version__,
        "hardware": f"{platform.machine()} cpu",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/bench_losses_on_emoji.py",
    }
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *provenance])
        writer.writeheader()
        writer.writerows(row | provenance for row in rows)
    print(f"written to {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


if __name__ == "__main__":
    main()
