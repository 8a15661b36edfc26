"""Large batches on one GPU: steps on micro-batches, compared with the largest direct batch of the same model.

    python benchmarks/bench_micro_batch.py               # ViT-B-32: direct 1,024 upwards; 32,768 in micro-batches
    python benchmarks/bench_micro_batch.py --cap 38      # with that many GiB allowed to the process
    python benchmarks/bench_micro_batch.py --quick       # a small model, on a CPU too; no row is kept

A step is forward, loss, backward, finite check and AdamW, in bf16 autocast on CUDA; pixels are uint8, captions of 8
to 23 tokens padded to the model's length. Memory is PyTorch's peak. Rows go to benchmarks/results/micro_batch.csv.
"""

import gc
import time
from pathlib import Path

import torch
from evidence.command_line import Flag, command_line
from evidence.measurements import append
from steps import device_name, step_context, synchronize, synthetic_batch

import leanclip
from leanclip.models import ModelConfig, create_model
from leanclip.training.step import training_step

RESULTS = Path(__file__).parent / "results" / "micro_batch.csv"


def measure(
    name: str, loss: str, batch: int, micro_batch: int | None, device: torch.device, steps: int
) -> dict[str, float]:
    """Seconds per step and peak memory, after one step that fills the optimizer's state."""
    torch.manual_seed(0)
    model = create_model(ModelConfig(model=name)).to(device).train()
    count = 1 if micro_batch is None else -(-batch // micro_batch)
    context = step_context(model, loss, batch=batch, samples=99 * batch, device=device, micro_batches=count)
    data = synthetic_batch(model, batch, device)
    training_step(context, data)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        result = training_step(context, data)
        assert not result.skipped and torch.isfinite(result.loss)
    synchronize(device)
    seconds = (time.perf_counter() - began) / steps
    peak, reserved = (0, 0) if device.type == "cpu" else (
        torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())  # fmt: skip
    return {
        "samples_per_second": round(batch / seconds, 1), "seconds_per_step": round(seconds, 4),
        "peak_gib": round(peak / 2**30, 2), "reserved_gib": round(reserved / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    arguments = command_line(
        __doc__, quick={"model": "leanclip-tiny", "batch": 32, "micro": [8], "direct": [16]},
        model="ViT-B-32", loss="fastclip-v3", batch=32_768, micro=[512, 1024],
        direct=[1024, 2048, 3072, 3584, 4096], steps=2,
        cap=Flag(None, "GiB that PyTorch may take", kind=float), output=RESULTS,
    )  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.cap and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(arguments.cap * 2**30 / torch.cuda.mem_get_info()[1])
    provenance = {
        "version": leanclip.__version__, "torch": torch.__version__, "device": device_name(),
        "model": arguments.model, "loss": arguments.loss,
    }  # fmt: skip
    cases = [(batch, None) for batch in arguments.direct] + [(arguments.batch, micro) for micro in arguments.micro]
    for batch, micro in cases:
        try:
            figures = measure(arguments.model, arguments.loss, batch, micro, device, arguments.steps)
        except torch.cuda.OutOfMemoryError:
            print(f"batch {batch}, micro-batch {micro}: does not fit")
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        mode = "direct" if micro is None else "micro-batches"
        row = provenance | {"mode": mode, "batch": batch, "micro_batch": micro or batch} | figures
        print(f"{mode:<14} batch {batch:>6} x {row['micro_batch']:>5}: "
              f"{row['samples_per_second']:>9,.1f} samples/s, peak {row['peak_gib']} GiB")  # fmt: skip
        append(arguments.output, row | {"cap_gib": arguments.cap or ""})


if __name__ == "__main__":
    main()
