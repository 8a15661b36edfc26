"""How exact the planner is: predicted against measured memory and time of training steps on one GPU.

    python benchmarks/bench_plan.py             # calibrates, predicts and measures; under four minutes on an H200
    python benchmarks/bench_plan.py --quick     # one small case, on a CPU too: predictions only; nothing is kept

Predicted: `leanclip.training.predict` on fake tensors, in processes that do not see the GPU, with the card as
`leanclip.planning.measure` finds it by timing bare operations (no model is calibrated on). Measured: the same
`training_step` on random pixels and captions of the model's whole length; memory is PyTorch's `max_memory_allocated`,
time the median of the steps of one second (at most five) after one that warms up. Rows go to
benchmarks/results/plan.csv, the table to docs/planning.md.
"""

import argparse
import copy
import csv
import functools
import gc
import os
import statistics
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

import leanclip
from leanclip.data import Batch, DataConfig
from leanclip.losses import loss_from_config
from leanclip.models import ModelConfig, TwoTower
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.planning.card import Card, calibrated, card_named
from leanclip.training.config import ParallelConfig, RunConfig, TrainConfig
from leanclip.training.pieces import Pieces
from leanclip.training.predict import predict_step
from leanclip.training.step import training_step
from leanclip.training.towers import build_towers

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan.csv"
DOCS = HERE.parent / "docs" / "planning.md"
BEGIN, END = "<!-- accuracy: written by benchmarks/bench_plan.py -->", "<!-- end of accuracy -->"
SAMPLES = 1_000_000


@dataclass(frozen=True)
class Case:
    model: str
    loss: str
    batch: int
    micro: int | None = None
    checkpointing: bool = False

    @property
    def parts(self) -> int:
        return 1 if self.micro is None else -(-self.batch // self.micro)

    def config(self) -> TrainConfig:
        return TrainConfig(
            model=ModelConfig(model=self.model),
            data=DataConfig(global_batch_size=self.batch),
            run=RunConfig(loss=self.loss, precision="amp_bf16"),
            parallel=ParallelConfig(micro_batch=self.micro, grad_checkpointing=self.checkpointing),
            optim=OptimConfig(lr=1e-5, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6),
        )


CASES = (
    Case("ViT-B-32", "fastclip-v3", 1024),
    Case("ViT-B-32", "infonce", 2048),
    Case("ViT-B-32", "fastclip-v3", 4096, micro=512),
    Case("ViT-B-32", "siglip", 4096, micro=2048),
    Case("ViT-B-32", "fastclip-v2", 4096, checkpointing=True),
    Case("ViT-B-32", "infonce", 4096, micro=1024, checkpointing=True),
    Case("ViT-B-16", "fastclip-v3", 512),
    Case("ViT-B-16", "siglip", 2048, micro=256),
    Case("ViT-B-16", "fastclip-v1", 1024, checkpointing=True),
    Case("ViT-L-14", "fastclip-v3", 128),
    Case("ViT-L-14", "infonce", 512, micro=128),
    Case("ViT-L-14", "fastclip-v3", 512, micro=256, checkpointing=True),
    Case("RN50", "fastclip-v3", 512),
    Case("RN50", "infonce", 1024, micro=256),
    Case("convnext_base", "fastclip-v3", 256),
    Case("leanclip-tiny", "fastclip-v3", 128),
)
QUICK = (Case("leanclip-tiny", "fastclip-v3", 32, micro=16),)
FIELDS = (
    "version", "torch", "device", "model", "loss", "batch", "micro_batch", "checkpointing", "predicted_gib",
    "measured_gib", "memory_error", "predicted_seconds", "measured_seconds", "time_error",
)  # fmt: skip


def predict(case: Case, card: Card) -> tuple[float, float]:
    """GiB and seconds of a step."""
    found = predict_step(
        case.config(),
        samples=SAMPLES,
        parts=case.parts,
        capability=card.capability,
        processors=card.processors,
    )
    return found.peak / 2**30, card.step(found.kernels, found.parameters)


def synthetic(model: TwoTower, batch: int, device: torch.device) -> Batch:
    size = model.preprocess.size
    height, width = (size, size) if isinstance(size, int) else size
    tokens = model.tokenizer([" ".join(["dog"] * 1000)]).to(device)
    return Batch(
        images=torch.randint(256, (batch, 3, height, width), dtype=torch.uint8, device=device),
        tokens=tokens.expand(batch, -1).contiguous(),
        sample_ids=torch.arange(batch),
    )


@functools.lru_cache(1)
def built(model: str) -> TwoTower:
    """On the CPU; kept while cases of the same model follow each other."""
    return build_towers(Case(model, "infonce", 1).config())


def measure(case: Case, device: torch.device) -> tuple[float, float]:
    torch.manual_seed(0)
    config = case.config()
    model = copy.deepcopy(built(case.model)).to(device).train()
    if case.checkpointing:
        model.checkpoint_activations()
    loss = loss_from_config(case.loss, config.loss, num_samples=SAMPLES).to(device)
    loss.set_epoch(0, 1)
    optimizer = create_optimizer(config.optim, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    autocast = torch.autocast("cuda", torch.bfloat16)
    pieces = Pieces(
        towers=model, loss=loss, optimizer=optimizer, batch=case.batch, parts=case.parts, autocast=autocast
    )
    data = synthetic(model, case.batch, device)
    training_step(pieces, data)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    took = []
    while len(took) < 5 and sum(took) < 1.0:
        began = time.perf_counter()
        assert not training_step(pieces, data).skipped
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return torch.cuda.max_memory_allocated() / 2**30, statistics.median(took)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def row_of(case: Case, predicted: tuple[float, float], measured: tuple[float, float] | None) -> dict[str, object]:
    row: dict[str, object] = {
        "version": leanclip.__version__, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "model": case.model, "loss": case.loss, "batch": case.batch, "micro_batch": case.micro or "",
        "checkpointing": "yes" if case.checkpointing else "", "predicted_gib": round(predicted[0], 2),
        "predicted_seconds": round(predicted[1], 4),
    }  # fmt: skip
    if measured is not None:
        row |= {
            "measured_gib": round(measured[0], 2), "memory_error": f"{predicted[0] / measured[0] - 1:+.3f}",
            "measured_seconds": round(measured[1], 4), "time_error": f"{predicted[1] / measured[1] - 1:+.3f}",
        }  # fmt: skip
    return row


def table(rows: list[dict[str, object]]) -> str:
    """The rows as the documentation shows them."""
    head = (
        "| model | loss | batch | micro-batch | recomputed | GiB predicted / measured | | s predicted / measured | |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['loss']} | {int(str(row['batch'])):,} | {row['micro_batch']}"
            f" | {row['checkpointing']}"
            f" | {float(str(row['predicted_gib'])):.2f} / {float(str(row['measured_gib'])):.2f}"
            f" | {float(str(row['memory_error'])):+.1%}"
            f" | {float(str(row['predicted_seconds'])):.3f} / {float(str(row['measured_seconds'])):.3f}"
            f" | {float(str(row['time_error'])):+.1%} |"
        )
    return "\n".join(lines)


def write_docs(rows: list[dict[str, object]], path: Path = DOCS) -> None:
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="measure the card again, whatever is remembered")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    arguments = parser.parse_args()
    here = torch.cuda.is_available()
    card = calibrated(torch.device("cuda"), again=arguments.again) if here else card_named("H200")
    print(
        f"{card.name}: {card.matrix / 1e12:.0f} TFLOP/s, {card.bandwidth / 1e12:.2f} TB/s ({card.source})", flush=True
    )
    cases = QUICK if arguments.quick else CASES
    if arguments.quick or not here:
        for case in cases:
            print(row_of(case, predict(case, card), None))
        return
    rows: list[dict[str, object]] = []
    with (
        ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool,
        arguments.output.open("w", newline="") as file,
    ):
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        coming: list[Future[tuple[float, float]]] = [pool.submit(predict, case, card) for case in cases]
        for case, predicted in zip(cases, coming, strict=True):
            measured = measure(case, torch.device("cuda"))
            free()
            rows.append(row_of(case, predicted.result(), measured))
            writer.writerow(rows[-1])  # pyright: ignore[reportArgumentType]
            file.flush()
            print(*(rows[-1][name] for name in FIELDS[3:]), flush=True)
    if DOCS.is_file() and arguments.output == RESULTS:
        write_docs(rows)


if __name__ == "__main__":
    main()
