"""Large batches on one GPU: training steps on micro-batches against the same model at its largest direct batch.

    python benchmarks/bench_micro_batch.py               # ViT-B-32: direct 1,024 upwards; 32,768 in micro-batches
    python benchmarks/bench_micro_batch.py --cap 38      # with that many GiB allowed to the process
    python benchmarks/bench_micro_batch.py --quick       # a small model, on a CPU too; nothing is kept

A step is forward, loss, backward, finite check and AdamW, in bf16 autocast on CUDA; pixels are uint8, captions of 8
to 23 tokens padded to the model's length. Memory is PyTorch's peak. Rows go to benchmarks/results/micro_batch.csv.
"""

import argparse
import csv
import gc
import os
import time
from pathlib import Path

import torch

import leanclip
from leanclip.data import Batch
from leanclip.models import ModelConfig, TwoTower, create_model
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

RESULTS = Path(__file__).parent / "results" / "micro_batch.csv"
WORDS = "a photograph of two small brown dogs that play with an old red ball on the wet green grass"
FIELDS = (
    "version", "torch", "device", "model", "loss", "mode", "batch", "micro_batch", "samples_per_second",
    "seconds_per_step", "peak_gib", "reserved_gib", "cap_gib",
)  # fmt: skip


def synthetic(model: TwoTower, batch: int, device: torch.device) -> Batch:
    size = model.preprocess.size
    height, width = (size, size) if isinstance(size, int) else size
    words = WORDS.split()
    captions = model.tokenizer([" ".join(words[: 6 + number % 14]) for number in range(28)])
    return Batch(
        images=torch.randint(256, (batch, 3, height, width), dtype=torch.uint8, device=device),
        tokens=captions.to(device)[torch.arange(batch, device=device) % len(captions)],
        sample_ids=torch.arange(batch),
    )


def measure(
    name: str, loss_name: str, batch: int, micro: int | None, device: torch.device, steps: int
) -> dict[str, float]:
    """Seconds per step and peak memory, after one step that warms up and fills the optimizer's state."""
    torch.manual_seed(0)
    model = create_model(ModelConfig(model=name)).to(device).train()
    loss = leanclip.create_loss(loss_name, num_samples=None if loss_name in ("infonce", "siglip") else 99 * batch).to(
        device
    )
    loss.set_epoch(0, 1)
    config = OptimConfig(lr=1e-5, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6)
    optimizer = create_optimizer(config, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    parts = 1 if micro is None else -(-batch // micro)
    context = StepContext(
        towers=model, loss=loss, optimizer=optimizer, global_batch=batch, micro_batches=parts, autocast=autocast
    )
    data = synthetic(model, batch, device)
    training_step(context, data)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        result = training_step(context, data)
        assert not result.skipped and torch.isfinite(result.loss)  # waits for the device
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    peak, reserved = (0, 0) if device.type == "cpu" else (
        torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())  # fmt: skip
    return {
        "samples_per_second": round(batch / seconds, 1), "seconds_per_step": round(seconds, 4),
        "peak_gib": round(peak / 2**30, 2), "reserved_gib": round(reserved / 2**30, 2),
    }  # fmt: skip


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--loss", default="fastclip-v3")
    parser.add_argument("--batch", type=int, default=32_768)
    parser.add_argument("--micro", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--direct", type=int, nargs="*", default=[1024, 2048, 3072, 3584, 4096])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cap", type=float, help="GiB that PyTorch may take")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.batch, arguments.micro, arguments.direct = "leanclip-tiny", 32, [8], [16]
        arguments.output = Path(os.devnull)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.cap and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(arguments.cap * 2**30 / torch.cuda.mem_get_info()[1])
    provenance = {
        "version": leanclip.__version__, "torch": torch.__version__, "model": arguments.model, "loss": arguments.loss,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "cap_gib": arguments.cap or "",
    }  # fmt: skip
    new = not arguments.output.exists()
    with arguments.output.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        cases = [(batch, None) for batch in arguments.direct] + [
            (arguments.batch, micro) for micro in arguments.micro
        ]
        for batch, micro in cases:
            try:
                figures = measure(arguments.model, arguments.loss, batch, micro, device, arguments.steps)
            except torch.cuda.OutOfMemoryError:
                print(f"batch {batch}, micro-batch {micro}: does not fit")
                free()
                continue
            free()
            row = provenance | {"mode": "direct" if micro is None else "micro-batches", "batch": batch,
                           "micro_batch": micro or batch} | figures  # fmt: skip
            writer.writerow(row)  # pyright: ignore[reportArgumentType]
            file.flush()
            print(f"{row['mode']:<14} batch {batch:>6} x {row['micro_batch']:>5}: "
                  f"{row['samples_per_second']:>9,.1f} samples/s, peak {row['peak_gib']} GiB")  # fmt: skip


if __name__ == "__main__":
    main()
