"""A whole training step on one GPU: leanclip against open_clip's own model, loss and AdamW in the same process.

    python benchmarks/bench_step.py                              # the table, on a GPU; about ten minutes
    python benchmarks/bench_step.py --case "ViT-B-32" --provider leanclip open_clip
    python benchmarks/bench_step.py --quick                      # a tiny model, on a CPU too; nothing is kept
    python benchmarks/bench_step.py --plot                       # draw the newest results, measure nothing

Both get the same synthetic images and captions of 8 to 23 tokens (`one long`: one of them fills the context), on the
device: open_clip as normalised float32 padded to the context length, leanclip as 8-bit pixels with the lengths known.
A step is forward, loss, backward and AdamW under bf16 autocast; leanclip's also has its finite check. Memory is
PyTorch's peak. MFU counts, for all alike, the arithmetic of the captions' own tokens (three times the forward pass),
over the rate of a large bf16 matrix product measured in the same run, and over the 989 TFLOP/s of the data sheet.
"""

import datetime
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import open_clip
import torch
from evidence.command_line import Flag, command_line
from evidence.measurements import append
from steps import device_name, step_context, synchronize

import leanclip
from leanclip.data import Batch
from leanclip.losses.pair_weights import Mode
from leanclip.models import ModelConfig, create_model
from leanclip.planning.gpu_model import matrix_rate
from leanclip.training.cuda_graph import CudaGraphs
from leanclip.training.model_setup import cuda_graph_pays
from leanclip.training.step import training_step

RESULTS = Path(__file__).parent / "results" / "step.csv"
NOMINAL = 989e12
SMALL = {
    "embed_dim": 384,
    "vision_cfg": {"image_size": 64, "layers": 12, "width": 384, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 384, "heads": 6, "layers": 12},
}
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 997, "width": 64, "heads": 1, "layers": 2},
}
BATCHES = 3  # of captions, which take turns: their packed sizes differ


@dataclass(frozen=True)
class Case:
    name: str
    model: str | dict[str, Any]
    batch: int
    one_long: bool = False


CASES = (
    Case("ViT-B-32", "ViT-B-32", 2048),
    Case("ViT-B-32, one long", "ViT-B-32", 2048, one_long=True),
    Case("ViT-B-16", "ViT-B-16", 768),
    Case("ViT-L-14", "ViT-L-14", 256),
    Case("small at 64 px", SMALL, 128),
)
PROVIDERS = ("leanclip", "leanclip eager", "leanclip fastclip-v3", "open_clip", "open_clip compiled")
Step = Callable[[int], Any]  # the number of the captions that it takes


class Data:
    """The same images and captions for every provider."""

    def __init__(self, case: Case, config: dict[str, Any], device: torch.device) -> None:
        self.config, self.device, self.batch = config, device, case.batch
        generator = torch.Generator().manual_seed(0)
        vocabulary, width = config["text_cfg"]["vocab_size"], config["text_cfg"]["context_length"]
        self.lengths, self.tokens = [], []
        for _ in range(BATCHES):
            lengths = torch.randint(8, 24, (case.batch,), generator=generator)
            if case.one_long:
                lengths[case.batch // 2] = width
            tokens = torch.randint(1, vocabulary - 2, (case.batch, width), generator=generator)
            place = torch.arange(width)
            tokens[:, 0] = vocabulary - 2
            tokens[place == lengths[:, None] - 1] = vocabulary - 1
            tokens[place >= lengths[:, None]] = 0
            self.lengths.append(lengths)
            self.tokens.append(tokens.to(device))
        size = config["vision_cfg"]["image_size"]
        self.pixels = torch.randint(256, (case.batch, 3, size, size), dtype=torch.uint8, device=device)

    @property
    def mean_length(self) -> float:
        return float(torch.stack(self.lengths).float().mean())

    def operations(self) -> float:
        """Of a step and sample, forward and backward, on the captions' own tokens."""
        vision, text = self.config["vision_cfg"], self.config["text_cfg"]
        patches = (vision["image_size"] // vision["patch_size"]) ** 2
        image = _transformer(vision["width"], vision["layers"], patches + 1, (patches + 1) ** 2)
        image += 2 * patches * 3 * vision["patch_size"] ** 2 * vision["width"]
        lengths = torch.stack(self.lengths).float()
        texts = _transformer(text["width"], text["layers"], float(lengths.mean()), float(lengths.square().mean()))
        return 3 * (image + texts)


def _transformer(width: int, layers: int, tokens: float, pairs: float) -> float:
    return layers * (24 * width**2 * tokens + 4 * width * pairs)


def open_clip_step(case: Case, data: Data, *, compiled: bool) -> Step:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = _model_file(case, Path(folder))
        if isinstance(case.model, dict):
            open_clip.add_model_config(model)
        clip: Any = open_clip.create_model(Path(model).stem).to(data.device).train()
    loss = open_clip.ClipLoss()
    parameters = list(clip.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.98), eps=1e-6)
    call = torch.compile(clip) if compiled else clip
    images = data.pixels.float().div_(255).sub_(0.45).div_(0.27)
    autocast = torch.autocast(data.device.type, torch.bfloat16, enabled=data.device.type == "cuda")

    def step(number: int) -> None:
        with autocast:
            image, text, scale = call(images, data.tokens[number])[:3]
            value = loss(image, text, scale)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            clip.logit_scale.clamp_(0, math.log(100))

    return step


def leanclip_step(case: Case, data: Data, loss_name: str, *, compiled: bool, pair_weights: Mode = "off") -> Step:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = create_model(ModelConfig(model=_model_file(case, Path(folder)))).to(data.device).train()
    context = step_context(
        model, loss_name, batch=case.batch, samples=100 * case.batch, device=data.device, pair_weights=pair_weights
    )
    if compiled and data.device.type == "cuda":
        model.compile_towers()
        if cuda_graph_pays(model, case.batch):
            context = replace(context, cuda_graphs=CudaGraphs(model, context.autocast))
    ids = torch.arange(case.batch)
    batches = [
        Batch(images=data.pixels, tokens=tokens, sample_ids=ids, lengths=lengths)
        for tokens, lengths in zip(data.tokens, data.lengths, strict=True)
    ]

    def step(number: int) -> None:
        assert not training_step(context, batches[number].pack(model.texts)).skipped

    return step


def step_of(provider: str, case: Case, data: Data) -> Step:
    if provider.startswith("open_clip"):
        return open_clip_step(case, data, compiled="compiled" in provider)
    loss = "fastclip-v3" if "fastclip" in provider else "infonce"
    return leanclip_step(case, data, loss, compiled="eager" not in provider)


def config_of(case: Case) -> dict[str, Any]:
    if isinstance(case.model, dict):
        return case.model
    config = open_clip.get_model_config(case.model)
    assert config is not None
    return config


def _model_file(case: Case, folder: Path) -> str:
    """The name of a model of open_clip's, or a file with the configuration."""
    if isinstance(case.model, str):
        return case.model
    path = folder / "bench-small.json"
    path.write_text(json.dumps(case.model))
    return str(path)


def measure(step: Step, device: torch.device, *, seconds: float) -> dict[str, float]:
    """The first step alone; then each set of captions twice; then steps for about `seconds`."""

    def timed(count: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for number in range(count):
            step(number % BATCHES)
        synchronize(device)
        return (time.perf_counter() - began) / count

    first = timed(1)
    timed(2 * BATCHES)
    steps = max(BATCHES, round(seconds / timed(BATCHES) / BATCHES) * BATCHES)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    mean = timed(steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"ms_per_step": round(1e3 * mean, 3), "peak_gib": round(peak, 2), "first_step_s": round(first, 1)}


def free() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row_of(case: Case, provider: str, device: torch.device, rate: float, seconds: float) -> dict[str, Any]:
    data = Data(case, config_of(case), device)
    figures = measure(step_of(provider, case, data), device, seconds=seconds)
    per_second = case.batch / figures["ms_per_step"] * 1e3
    work = data.operations()
    return figures | {
        "date": datetime.date.today().isoformat(), "version": leanclip.__version__, "torch": torch.__version__,
        "device": device_name(),
        "case": case.name, "provider": provider, "batch": case.batch,
        "loss": "fastclip-v3" if "fastclip" in provider else "infonce",
        "tokens_per_caption": round(data.mean_length, 2), "samples_per_second": round(per_second, 1),
        "gflop_per_sample": round(work / 1e9, 2), "mfu_measured": round(work * per_second / rate, 4),
        "mfu_nominal": round(work * per_second / NOMINAL, 4), "matmul_tflops": round(rate / 1e12, 1),
    }  # fmt: skip


def main() -> None:
    arguments = command_line(
        __doc__, quick={"seconds": 0.1, "provider": ["leanclip", "leanclip fastclip-v3", "open_clip"]},
        case=[case.name for case in CASES], provider=list(PROVIDERS),
        seconds=Flag(4.0, "of steps that are timed, for each row"), plot=False, output=RESULTS,
    )  # fmt: skip
    if arguments.plot:
        from plots import draw_step

        print(f"wrote {draw_step(arguments.output)}")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [case for case in CASES if case.name in arguments.case]
    if arguments.quick:
        cases = [Case("tiny", TINY, 16)]
        torch.set_num_threads(1)
    rate = matrix_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    print(f"large matrix product: {rate / 1e12:.1f} TFLOP/s")
    for case in cases:
        for provider in arguments.provider:
            try:
                row = row_of(case, provider, device, rate, arguments.seconds)
            except torch.cuda.OutOfMemoryError:
                print(f"{case.name}, {provider}: does not fit")
                free()
                continue
            free()
            print(
                f"{case.name:<20} {provider:<22} {row['samples_per_second']:>9,.0f} samples/s"
                f"  {row['ms_per_step']:>8} ms  {row['peak_gib']:>6} GiB  MFU {row['mfu_measured']:.1%}"
                f"  first step {row['first_step_s']} s",
                flush=True,
            )
            append(arguments.output, row)


if __name__ == "__main__":
    main()
