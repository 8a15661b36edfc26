"""The cost of the per-sample state: the loss with a table of 100 million samples, compared with a ViT-B-32 step.

python benchmarks/bench_state.py            # one GPU
python benchmarks/bench_state.py --quick    # CPU smoke run
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from steps import append_rows, device_name, step_context, synchronize, synthetic_batch
from torch.nn.functional import normalize

import leanclip
from leanclip.models import ModelConfig, create_model
from leanclip.training.step import training_step

RESULTS = Path(__file__).parent / "results" / "state.csv"


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of a call until the device has finished."""
    times = []
    for _ in range(3):
        call()
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] * 1e3


def loss_time(name: str, batch: int, samples: int, device: torch.device, repeats: int) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    image, text = (normalize(torch.randn(batch, 512, device=device), dim=1).to(dtype).requires_grad_() for _ in "it")
    loss = leanclip.create_loss(name, num_samples=None if name == "infonce" else samples).to(device)
    loss.set_epoch(1, 4)
    ids = [torch.randperm(min(samples, 10**6))[:batch] * (samples // min(samples, 10**6)) for _ in range(8)]
    turn = iter(range(10**9))
    return milliseconds(lambda: loss(image, text, ids[next(turn) % 8]).loss.backward(), device, repeats)


def step_time(name: str, model_name: str, batch: int, samples: int, device: torch.device, repeats: int) -> float:
    model = create_model(ModelConfig(model=model_name)).to(device)
    context = step_context(model, name, batch=batch, samples=samples, device=device)
    data = synthetic_batch(model, batch, device)
    return milliseconds(lambda: training_step(context, data), device, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    quick = (arguments := parser.parse_args()).quick
    device = torch.device("cpu" if quick else "cuda")
    model, batch, samples, repeats = ("leanclip-tiny", 16, 1000, 2) if quick else ("ViT-B-32", 1024, 100_000_000, 20)
    step = step_time("fastclip-v3", model, batch, samples, device, repeats)
    plain = loss_time("infonce", batch, samples, device, repeats)
    rows = [{"what": f"{model} step, fastclip-v3", "ms": step, "share_of_step": 1.0},
            {"what": "infonce loss", "ms": plain, "share_of_step": plain / step}]  # fmt: skip
    for name in ("fastclip-v3", "fastclip-v2"):
        ms = loss_time(name, batch, samples, device, repeats)
        rows.append({"what": f"{name} loss", "ms": ms, "share_of_step": ms / step})
        rows.append(
            {"what": f"{name} state (loss - infonce loss)", "ms": ms - plain, "share_of_step": (ms - plain) / step}
        )
    for row in rows:
        print(f"{row['what']:<44}{row['ms']:>10.3f} ms{row['share_of_step']:>9.2%} of the step")
    provenance = {
        "batch": batch,
        "samples": samples,
        "gpu": device_name(),
        "torch": torch.__version__,
        "version": leanclip.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    if not quick:
        append_rows(arguments.output, [row | provenance for row in rows])


if __name__ == "__main__":
    main()
