"""leanclip embed: its rate, its memory over time, kills and several processes; and beside open_clip's own loop.

    python benchmarks/bench_embed.py                       # 1 million small images, a tiny ViT, on a CPU
    python benchmarks/bench_embed.py --parts compare --images 100000    # ViT-B-32 beside open_clip, on a GPU
    python benchmarks/bench_embed.py --quick               # seconds, on a CPU; nothing is kept

`pass`, `killed` and `processes` run the command itself on generated images of 64 pixels, which are decoded quickly:
once; killed ten times (the whole command, by SIGKILL) and given again; and on two processes. The files must be equal.
CPU microseconds of a sample are those of the workers, which decode, and of the main process, which does the rest;
memory is the private memory of all processes together, sampled twice a second: the largest, and the medians around
a tenth and nine tenths of the samples.

`compare` embeds the same JPEGs of 500 x 375 with the same weights and as many workers by leanclip and by a loop over
open_clip's webdataset pipeline; rates are those of the last three quarters. Rows go to results/embed.csv.
"""

import filecmp
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bench_data
import numpy as np
import open_clip
import torch
from bench_end_to_end import contents, write_shards
from evidence.command_line import Flag, command_line
from evidence.measurements import append
from steps import device_name

import leanclip
from leanclip.data import DataConfig, EvaluationTransform, synthetic
from leanclip.device import autocast_of
from leanclip.evaluation import EvaluationSettings
from leanclip.features.locked_towers import view_batches
from leanclip.models import ModelConfig, create_model
from leanclip.models.export import export_open_clip
from leanclip.progress import ACTIVITY
from leanclip.search.embed import BLOCK, embed_data

open_clip_data: Any = bench_data.open_clip_train.data  # with its repairs
RESULTS = Path(__file__).parent / "results" / "embed.csv"
SIDE, KILLS, DECODED = 64, 10, 20_000
TINY = (
    '{"embed_dim": 64, "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},'
    ' "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 1, "layers": 1}}'
)
SCRIPT = f"""import sys
from leanclip.cli import main
from leanclip.data import synthetic

synthetic.RAW_SIDE = {SIDE}
main(["embed", *sys.argv[1:]])
"""
FILES = ("images/features.npy", "images/done.npy", "keys.npy")
FIELDS = (
    "what", "model", "samples", "seconds", "per_second", "decoding_alone", "worker_us", "main_us", "gib",
    "gib_early", "gib_late", "equal", "precision", "workers", "load",
)  # fmt: skip
TICK = os.sysconf("SC_CLK_TCK")


class Watch:
    """Private memory and CPU seconds of a process and its children, sampled while it runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.gib: list[tuple[int, float]] = []  # beside the samples that were done
        self.cpu: dict[int, float] = {}
        self.main = process.pid

    def sample(self, samples: int) -> None:
        processes, gib = [self.main], 0.0
        for pid in processes:
            try:
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    processes += map(int, children.read_text().split())
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue  # it has ended
            self.cpu[pid] = (int(fields[11]) + int(fields[12])) / TICK
            gib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 2**20
        self.gib.append((samples, gib))

    def median_gib(self, low: float, high: float) -> float:
        """While the samples that were done were between two numbers."""
        return statistics.median([gib for samples, gib in self.gib if low <= samples <= high] or [float("nan")])


def command(model: Path, samples: int, out: Path, workers: int, processes: int = 1) -> list[str]:
    """leanclip embed on generated images of SIDE pixels."""
    script = model.with_name("leanclip_embed.py")
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    flags = ["--of", "images", "--device", "cpu", "--workers", str(workers)]
    arguments = [str(script), str(model), f"synthetic:{samples}", str(out), *flags]
    return [sys.executable, *(launch if processes > 1 else []), *arguments]


def watched(arguments: list[str], log: Path, out: Path, until: int | None = None) -> Watch:
    """Run a command to its end, or kill it when `until` samples are done."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=file, env=environment)
    watch = Watch(process)
    while process.poll() is None:
        samples = done(out)
        watch.sample(samples)
        if until is not None and samples >= until:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.5 if until is None else 0.05)
    if until is None and process.returncode:
        raise RuntimeError(log.read_text()[-2000:])
    return watch


def done(out: Path) -> int:
    try:
        return int(np.count_nonzero(np.load(out / "images/done.npy", mmap_mode="r")))
    except (OSError, ValueError, EOFError):  # not made yet
        return 0


def decoding_rate(model: Path, samples: int, workers: int) -> float:
    """Samples a second that the workers alone decode."""
    transform, few = EvaluationTransform(leanclip.load(model)[0].preprocess), min(DECODED, samples)
    began = time.perf_counter()
    with mock.patch.object(synthetic, "RAW_SIDE", SIDE):
        source = synthetic.Synthetic(samples)
        for _ in view_batches(source, np.arange(few), transform, views=1, seed=0, batch=BLOCK, workers=workers):
            pass
    return few / (time.perf_counter() - began)


def million(parts: list[str], samples: int, workers: int, folder: Path) -> Iterator[dict[str, Any]]:
    """One pass, and the ways to get the same files."""
    model, log = tiny(folder), folder / "log"
    one = folder / "pass"
    facts = {"model": "tiny ViT", "samples": samples, "precision": "fp32", "workers": workers}
    before = decoding_rate(model, samples, workers)
    began, load = time.perf_counter(), os.getloadavg()[0]
    watch = watched(command(model, samples, one, workers), log, one)
    seconds = time.perf_counter() - began
    decoding = (before + decoding_rate(model, samples, workers)) / 2
    main = watch.cpu.pop(watch.main)
    yield facts | {
        "what": "pass", "seconds": seconds, "per_second": samples / seconds, "decoding_alone": decoding,
        "worker_us": 1e6 * sum(watch.cpu.values()) / samples, "main_us": 1e6 * main / samples,
        "gib": max(gib for _, gib in watch.gib), "gib_early": watch.median_gib(samples / 20, 3 * samples / 20),
        "gib_late": watch.median_gib(17 * samples / 20, 19 * samples / 20),
        "load": (load + os.getloadavg()[0]) / 2,
    }  # fmt: skip
    if "killed" in parts:
        began, out = time.perf_counter(), folder / "killed"
        arguments = command(model, samples, out, workers)
        reached = []
        for kill in range(KILLS):
            watched(arguments, log, out, until=(kill + 1) * samples // (KILLS + 1))
            reached.append(done(out))
        assert reached[-1] < samples, "the last one was not killed"
        watched(arguments, log, out)
        yield compared(facts | {"what": f"killed at {reached}"}, one, out, began)
    if "processes" in parts:
        began, out = time.perf_counter(), folder / "processes"
        watched(command(model, samples, out, max(1, workers // 2), processes=2), log, out)
        yield compared(facts | {"what": "two processes"}, one, out, began)


def compared(row: dict[str, Any], one: Path, other: Path, began: float) -> dict[str, Any]:
    seconds = time.perf_counter() - began
    equal = all(filecmp.cmp(one / name, other / name, shallow=False) for name in FILES)
    return row | {"seconds": seconds, "equal": equal, "load": os.getloadavg()[0]}


def tiny(folder: Path) -> Path:
    (folder / "tiny-embed.json").write_text(TINY)
    torch.manual_seed(0)
    model = create_model(ModelConfig(model=str(folder / "tiny-embed.json"))).eval()
    export_open_clip(model, folder / "tiny-embed.safetensors", overwrite=True)
    return folder / "tiny-embed.safetensors"


@contextmanager
def stamped() -> Iterator[list[float]]:
    """The times at which leanclip embed finished its blocks."""
    times: list[float] = []

    def stamp() -> None:
        times.append(time.perf_counter())

    with mock.patch.object(ACTIVITY, "still_working", stamp):
        yield times


def last_three_quarters(times: list[float], samples: list[int]) -> float:
    """Samples a second after the first quarter: without what happens once."""
    first = len(times) // 4
    return sum(samples[first + 1 :]) / (times[-1] - times[first])


def compare(arguments: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """leanclip embed, and open_clip's model over open_clip's loader, alternating."""
    device = torch.device(arguments.device)
    workers, samples = arguments.workers, arguments.images
    weights = folder / "weights.safetensors"
    if arguments.model == "tiny-embed":
        tiny(folder).rename(weights)
        open_clip.add_model_config(folder / "tiny-embed.json")
    else:
        torch.manual_seed(0)
        export_open_clip(create_model(ModelConfig(model=arguments.model)).eval(), weights)
    shards = max(1, workers, samples // 10_000)  # open_clip's workers take whole shards
    pattern = write_shards(folder, contents(None, (500, 375), min(250, samples)), samples, shards)
    precision = "amp_bf16" if device.type == "cuda" else "fp32"
    rates: dict[str, list[float]] = {"leanclip": [], "open_clip": []}
    for repeat in range(arguments.repeats):
        with stamped() as times:
            store = embed_data(
                f"{arguments.model}:{weights}" if arguments.model != "tiny-embed" else str(weights),
                pattern, folder / f"out-{repeat}", of="images", config=DataConfig(), precision=precision,
                settings=EvaluationSettings(device=device, autocast=autocast_of(precision, device), workers=workers),
                notify=lambda _: None,
            )  # fmt: skip
            sizes = [min(BLOCK, samples - start) for start in range(0, samples, BLOCK)]
            rates["leanclip"].append(last_three_quarters(times[-len(sizes) :], sizes))
        rate, order, features = open_clip_loop(arguments.model, weights, pattern, samples, workers, device, precision)
        rates["open_clip"].append(rate)
        place = {store.key(index): index for index in range(store.samples)}
        ours = np.asarray(store.tables["images"].features)[[place[key] for key in order]].astype(np.float32)
        print(f"smallest cosine of leanclip's and open_clip's vectors: {(ours * features).sum(1).min():.4f}")
    for name, measured in rates.items():
        yield {
            "what": name, "model": arguments.model, "samples": samples, "per_second": statistics.median(measured),
            "precision": precision, "workers": workers, "load": os.getloadavg()[0],
        }  # fmt: skip


def open_clip_loop(
    name: str, weights: Path, pattern: str, samples: int, workers: int, device: torch.device, precision: str
) -> tuple[float, list[str], np.ndarray]:
    """As its evaluation runs: the webdataset pipeline of held-out data, the model, features on the host."""
    model: Any
    model, _, preprocess = open_clip.create_model_and_transforms(name, pretrained=str(weights), device=device)
    model.eval()
    arguments = SimpleNamespace(val_data=pattern, val_num_samples=samples, batch_size=BLOCK, workers=workers)
    keys: list[str] = []
    # No caption is tokenized; the key of a sample is in its place.
    with mock.patch.object(open_clip_data.wds, "rename", partial(keyed, open_clip_data.wds.rename)):
        data = open_clip_data.get_wds_dataset(arguments, preprocess, is_train=False, tokenizer=lambda text: [text])
    parts, times, sizes = [], [], []
    with torch.no_grad(), autocast_of(precision, device):
        for images, names in data.dataloader:
            features = model.encode_image(images.to(device, non_blocking=True), normalize=True)
            parts.append(features.float().cpu().numpy())
            keys += names
            times.append(time.perf_counter())
            sizes.append(len(images))
    return last_three_quarters(times, sizes), keys, np.concatenate(parts)


def keyed(rename: Any, image: str, text: str) -> Any:
    return rename(image=image, text="__key__")


def main() -> None:
    cuda, parts = torch.cuda.is_available(), ["pass", "killed", "processes"]
    quick = {
        "samples": 20_000, "images": 1100, "workers": 1, "repeats": 1, "model": "tiny-embed", "device": "cpu"
    }  # fmt: skip
    arguments = command_line(
        __doc__, quick=quick, parts=Flag(parts, choices=[*parts, "compare"]),
        samples=Flag(1_000_000, "small images of pass, killed and processes"),
        images=Flag(100_000, "JPEGs of compare"), model=Flag("ViT-B-32", "of compare"),
        device=Flag("cuda" if cuda else "cpu", "of compare"), workers=os.cpu_count() or 1,
        repeats=Flag(3, "of compare; the median is kept"), output=RESULTS,
    )  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as name:
        found = million(arguments.parts, arguments.samples, arguments.workers, Path(name))
        for row in found if arguments.parts != ["compare"] else ():
            rows.append(show(row))
        if "compare" in arguments.parts:
            (Path(name) / "compare").mkdir()
            rows += map(show, compare(arguments, Path(name) / "compare"))
    facts = {
        "device": device_name(), "cores": os.cpu_count(), "torch": torch.__version__,
        "open_clip": open_clip.__version__, "version": leanclip.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    append(arguments.output, *({field: row.get(field, "") for field in FIELDS} | facts for row in rows))


def show(row: dict[str, Any]) -> dict[str, Any]:
    row = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
