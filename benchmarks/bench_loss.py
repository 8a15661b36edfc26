"""Time and peak extra memory of one loss, forward and backward, against open_clip's and Inf-CL's.

    python benchmarks/bench_loss.py                      # the whole table, on a GPU
    python benchmarks/bench_loss.py --quick              # seconds, on any machine
    python benchmarks/bench_loss.py --requirements       # every batch beside open_clip, pass or fail; 90 s on an H200
    python benchmarks/bench_loss.py --plot               # draw the newest results, measure nothing

The floor is arithmetic alone: 8 B^2 d operations for contrastive losses (similarities twice, two products), 6 B^2 d
for the sigmoid loss, at the rate of a large matrix product measured in the same run.
"""

import datetime
import functools
import gc
import importlib.metadata
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from evidence.command_line import Flag, command_line
from evidence.measurements import append, rows

import leanclip
from leanclip.errors import first_line

RESULTS = Path(__file__).parent / "results"
OPERATIONS = {"infonce": 8, "dcl": 8, "siglip": 6, "fastclip-v2": 8, "fastclip-v3": 8}
BUSY_CYCLES = 10_000_000  # about 5 ms, longer than the host needs for a call
REQUIRED_BATCHES = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
Step = Callable[[], Any]


class Case:
    """Embeddings that require gradients, and the parameters of the baselines' losses."""

    def __init__(self, loss: str, batch: int, dim: int, dtype: torch.dtype, device: str) -> None:
        self.loss, self.batch, self.dim = loss, batch, dim
        torch.manual_seed(0)
        self.image, self.text = (
            F.normalize(torch.randn(batch, dim, device=device), dim=1).to(dtype).requires_grad_() for _ in range(2)
        )
        self.log_scale, self.bias = (
            torch.tensor(value, device=device, requires_grad=True) for value in (2.659, -10.0)
        )

        self.parameters = [self.image, self.text, self.log_scale, self.bias]

    def clear(self) -> None:
        for tensor in self.parameters:
            tensor.grad = None


def ours(case: Case, implementation: str = "auto") -> Step:
    samples = 1000 * case.batch if case.loss.startswith("fastclip") else None
    loss = leanclip.create_loss(case.loss, implementation=implementation, num_samples=samples).to(case.image.device)
    ids = torch.arange(case.batch, device=case.image.device)
    loss.set_epoch(0, 2)
    case.parameters += loss.parameters()

    def step() -> None:
        loss(case.image, case.text, ids).loss.backward()

    return step


def open_clip(case: Case, *, compiled: bool) -> Step:
    from open_clip.loss import ClipLoss, SigLipLoss

    function: Any = SigLipLoss() if case.loss == "siglip" else ClipLoss()
    if compiled:
        function = torch.compile(function)

    def step() -> None:
        bias = (case.bias,) if case.loss == "siglip" else ()
        function(case.image, case.text, case.log_scale.exp(), *bias).backward()

    return step


def inf_cl(case: Case) -> Step:
    from inf_cl import cal_flash_loss  # pyright: ignore[reportMissingImports]

    def step() -> None:
        scale = case.log_scale.exp()
        both = cal_flash_loss(case.image, case.text, scale=scale) + cal_flash_loss(case.text, case.image, scale=scale)
        (both.mean() / 2).backward()

    return step


def providers(loss: str) -> dict[str, Callable[[Case], Step]]:
    builders: dict[str, Callable[[Case], Step]] = {"leanclip": ours}
    if loss in ("infonce", "siglip"):
        builders["open_clip"] = functools.partial(open_clip, compiled=False)
        builders["open_clip compiled"] = functools.partial(open_clip, compiled=True)
    if loss == "infonce":
        builders["leanclip tiled"] = functools.partial(ours, implementation="tiled")
        builders["inf_cl"] = inf_cl
    return builders


def measure(case: Case, step: Step, repeats: int) -> dict[str, float | None]:
    """Percentiles of the milliseconds, launched alone and queued, and the peak MiB above what was allocated."""
    cuda, extra = case.image.is_cuda, extra_mib(case, step)
    alone, queued = [], []
    for _ in range(repeats):
        case.clear()
        alone.append(_milliseconds(step, cuda))
        if cuda:
            case.clear()
            queued.append(_milliseconds(step, cuda, busy=True))
    fifth = repeats // 5
    return {
        "median_ms": round(statistics.median(alone), 4),
        "low_ms": round(sorted(alone)[fifth], 4),  # 20th percentile
        "high_ms": round(sorted(alone)[-1 - fifth], 4),  # 80th percentile
        "extra_mib": extra,  # none where the device does not count it
        "queued_ms": round(statistics.median(queued), 4) if queued else None,  # as in a training step
    }


def extra_mib(case: Case, step: Step) -> float | None:
    """The peak above what was allocated, after a warm-up; none where the device does not count it."""
    for _ in range(3 if case.image.is_cuda else 1):
        case.clear()
        step()
    case.clear()
    if not case.image.is_cuda:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    case.clear()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def _milliseconds(step: Step, cuda: bool, *, busy: bool = False) -> float:
    """With `busy` the device has other work first, so that the host has launched everything when the clock starts."""
    if not cuda:
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if busy:
        torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Operations per millisecond of a large product."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    return 2 * size**3 / statistics.median(_milliseconds(lambda: torch.mm(a, b), device == "cuda") for _ in range(20))


def bench(args: Any) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rate = matmul_rate(device, dtype)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}: {rate / 1e9:.0f} TFLOP/s in a large {str(dtype)[6:]} product")
    facts = {"date": datetime.date.today().isoformat(), "device": name, "torch": torch.__version__,
             "triton": _version("triton"), "leanclip": leanclip.__version__}  # fmt: skip
    for loss, dim, batch in itertools.product(args.losses, args.dims, args.batches):
        floor = OPERATIONS[loss] * batch**2 * dim / rate
        for provider, build in providers(loss).items():
            if args.providers and provider not in args.providers:
                continue
            if provider != "leanclip" and batch > args.largest_for_baselines:
                continue
            key = {"loss": loss, "provider": provider, "dtype": str(dtype)[6:], "batch": batch, "dim": dim}
            times = _bench_one(loss, batch, dim, dtype, device, provider, build, args.repeats)
            if times is None:
                continue
            ratio = round(times["median_ms"] / floor, 3) if times["median_ms"] else None
            print(f"{loss:12s} {provider:20s} B={batch:<7d} d={dim:<5d} {times['median_ms']} ms, {ratio}x floor,"
                  f" queued {times['queued_ms']} ms, {times['extra_mib']} MiB", flush=True)  # fmt: skip
            append(args.output, facts | key | times | {"floor_ms": round(floor, 4), "times_floor": ratio})


def check_requirements(args: Any) -> bool:
    """Measure ours and open_clip's at every batch, interleaved, and print whether each requirement holds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, dim = torch.bfloat16 if device == "cuda" else torch.float32, args.dims[0]
    before, failures, total = stored_memory(args.output, dim), 0, 0
    for batch in args.batches:
        torch._dynamo.reset()  # every batch is compiled for its own shape
        steps: dict[tuple[str, str], tuple[Case, Step]] = {}
        for loss in ("infonce", "siglip", "fastclip-v3"):
            for provider, build in providers(loss).items():
                if provider.removeprefix("open_clip") in ("leanclip", "", *(() if args.quick else (" compiled",))):
                    case = Case(loss, batch, dim, dtype, device)
                    steps[loss, provider] = case, build(case)
        calls = max(5, min(args.repeats, 2 * 10**11 // batch**2 // dim))
        measured = interleaved(steps, calls)
        ours = {loss: measured[loss, "leanclip"] for loss in ("infonce", "siglip", "fastclip-v3")}
        checks = []  # what, the value, its limit
        for kind in ("alone", "queued") if device == "cuda" else ("alone",):
            for loss in ("infonce", "siglip"):
                best = min(times[kind] for (name, provider), times in measured.items()
                           if name == loss and provider != "leanclip")  # fmt: skip
                checks.append((f"{loss} {kind}", ours[loss][kind], (1.15 if batch < 512 else 1.05) * best))
            limit = (1.3 if batch <= 4096 else 1.1) * ours["infonce"][kind]
            checks.append((f"fastclip-v3 {kind}", ours["fastclip-v3"][kind], limit))
        if batch == 32768:
            checks.append(("infonce alone, ms", ours["infonce"]["alone"], 7.9))
        checks += [(f"{loss} MiB", ours[loss]["mib"], 1.1 * before[loss, batch])
                   for loss in ours if (loss, batch) in before and ours[loss]["mib"]]  # fmt: skip
        print(f"B={batch}, {calls} calls: " + ", ".join(
            f"{loss} {provider} " + "/".join(f"{times[kind]:.3f}" for kind in ("alone", "queued") if kind in times)
            for (loss, provider), times in measured.items()
        ), flush=True)  # fmt: skip
        for what, value, limit in checks:
            print(f"    {'pass' if value <= limit else 'FAIL'}  {what:20s} {value:9.3f} of {limit:9.3f}", flush=True)
        failures, total = failures + sum(value > limit for _, value, limit in checks), total + len(checks)
    print(f"{total - failures} of {total} requirements hold")
    return not failures


def interleaved(steps: dict[tuple[str, str], tuple[Case, Step]], calls: int) -> dict[tuple[str, str], dict[str, Any]]:
    """The median milliseconds of each step, alone and queued, and its MiB: one call of each after the other."""
    times = {key: {"mib": extra_mib(*step), "alone": [], "queued": []} for key, step in steps.items()}
    for number in range(calls):
        for key, (case, step) in steps.items():
            case.clear()
            times[key]["alone"].append(_milliseconds(step, case.image.is_cuda))
            if case.image.is_cuda and number % 2 == 0:
                case.clear()
                times[key]["queued"].append(_milliseconds(step, True, busy=True))
            case.clear()
    return {
        key: {kind: statistics.median(value) if isinstance(value, list) else value
              for kind, value in found.items() if value != []}
        for key, found in times.items()
    }  # fmt: skip


def stored_memory(path: Path, dim: int) -> dict[tuple[str, int], float]:
    """Our MiB in the stored results, by loss and batch, from 8,192 on."""
    ours = (row for row in rows(path) if row["provider"] == "leanclip" and int(row["dim"]) == dim)
    return {(row["loss"], int(row["batch"])): float(row["extra_mib"]) for row in ours
            if row["extra_mib"] and int(row["batch"]) >= 8192}  # fmt: skip


def _bench_one(
    loss: str, batch: int, dim: int, dtype: torch.dtype, device: str, provider: str,
    build: Callable[[Case], Step], repeats: int,
) -> dict[str, float | None] | None:  # fmt: skip
    """The measurements, empty values where memory did not suffice, or nothing where the provider cannot run."""
    try:
        case = Case(loss, batch, dim, dtype, device)
        torch._dynamo.reset()
        return measure(case, build(case), repeats)
    except torch.cuda.OutOfMemoryError:
        print(f"{loss} {provider} B={batch} d={dim}: out of memory")
        return dict.fromkeys(("median_ms", "low_ms", "high_ms", "extra_mib", "queued_ms"))
    except (ImportError, RuntimeError, AssertionError) as error:
        print(f"{loss} {provider} B={batch} d={dim}: skipped, {first_line(error)}")
        return None
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(arguments: list[str] | None = None) -> int:
    args = command_line(
        __doc__, arguments,
        quick={
            "batches": [256, 1024], "dims": [64], "repeats": 3,
            "providers": ["leanclip", "open_clip", "leanclip tiled"],
        },
        losses=Flag(["infonce", "siglip"], choices=sorted(OPERATIONS)),
        batches=Flag([], "default: 4096 to 262144, with --requirements 64 to 65536", kind=int), dims=[512],
        providers=Flag([], "default: all that can be imported"), largest_for_baselines=65536,
        repeats=Flag(0, "calls; default: 20, with --requirements 200"),
        requirements=Flag(False, "compare every batch with open_clip's losses"),
        plot=Flag(False, "draw the results to loss.svg beside them"), output=RESULTS / "loss.csv",
    )  # fmt: skip
    if args.plot:
        from plots import draw_loss

        print(f"wrote {draw_loss(args.output)}")
        return 0
    args.repeats = args.repeats or (200 if args.requirements else 20)
    if args.requirements:
        args.batches = args.batches or REQUIRED_BATCHES
        return 0 if check_requirements(args) or args.quick else 1
    args.batches = args.batches or [2**power for power in range(12, 19)]
    bench(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
