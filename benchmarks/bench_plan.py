"""How exact the planner is: predicted against measured memory and time of training steps on one GPU.

    python benchmarks/bench_plan.py             # on a GPU: measures and predicts; about six minutes on an H200
    python benchmarks/bench_plan.py --predict   # anywhere: predicts what an H200 measured, and writes the table
    python benchmarks/bench_plan.py --quick     # one small case, on a CPU too: predictions only; nothing is kept

Measured: `training_step` as the trainer runs it, on random pixels and captions of 8 to 23 tokens. Memory is PyTorch's
`max_memory_allocated` after the first step, which compiles; time the mean of the steps of about a second. Predicted:
`leanclip.planning.step_prediction` on fake tensors, for the rates that `leanclip.planning.gpu_model` measures
in the same run, or with --predict for those of h200.json. Rows go to benchmarks/results/plan.csv as they come, the
table to docs/planning.md.
"""

import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from bench_step import SMALL, free
from evidence.command_line import Flag, command_line
from evidence.measurements import append, rows

import leanclip
from leanclip.data import Batch, DataConfig
from leanclip.distributed import Ranks
from leanclip.losses import loss_from_config
from leanclip.models import ModelConfig, TwoTower
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.planning.gpu_model import REFERENCE, GpuModel, measured_gpu, read_gpu
from leanclip.planning.step_prediction import caption_lengths, predict_step
from leanclip.runs.config import ParallelConfig, RunConfig, TrainConfig
from leanclip.training.cuda_graph import CudaGraphs
from leanclip.training.model_setup import model_for_run, uses_cuda_graph
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan.csv"
DOCS = HERE.parent / "docs" / "planning.md"
BEGIN, END = "<!-- accuracy: written by benchmarks/bench_plan.py -->", "<!-- end of accuracy -->"
SAMPLES = 1_000_000
CAPTION = 15.5  # tokens, of 8 to 23
SMALL_FILE = Path(tempfile.gettempdir()) / "small-64px.json"


@dataclass(frozen=True)
class Case:
    model: str
    loss: str
    batch: int
    micro: int | None = None
    checkpointing: bool | int = False
    compile: Literal["on", "off"] = "on"
    pad_text: bool = False

    @property
    def parts(self) -> int:
        return 1 if self.micro is None else -(-self.batch // self.micro)

    def config(self) -> TrainConfig:
        name = self.model
        if name == SMALL_FILE.stem:
            SMALL_FILE.write_text(json.dumps(SMALL))
            name = str(SMALL_FILE)
        return TrainConfig(
            model=ModelConfig(model=name),
            data=DataConfig(global_batch_size=self.batch),
            run=RunConfig(loss=self.loss, precision="amp_bf16"),
            parallel=ParallelConfig(
                micro_batch=self.micro, grad_checkpointing=self.checkpointing, compile=self.compile,
                pad_text=self.pad_text,
            ),
            optim=OptimConfig(lr=1e-5, wd=0.1, beta1=0.9, beta2=0.98, eps_opt=1e-6),
        )  # fmt: skip

    def row(self) -> dict[str, object]:
        recomputed = "all" if self.checkpointing is True else self.checkpointing or ""
        return {
            "model": self.model, "loss": self.loss, "batch": self.batch, "micro_batch": self.micro or "",
            "recomputed": recomputed, "compile": self.compile, "captions": "padded" if self.pad_text else "",
        }  # fmt: skip

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Case":
        recomputed: bool | int = row["recomputed"] == "all" or int(row["recomputed"] or 0)
        return cls(
            row["model"], row["loss"], int(row["batch"]), int(row["micro_batch"]) if row["micro_batch"] else None,
            recomputed, row["compile"], row["captions"] == "padded",
        )  # fmt: skip


CASES = (  # what matters most first
    Case("ViT-B-32", "infonce", 2048),
    Case("ViT-B-32", "fastclip-v3", 2048, compile="off"),
    Case("ViT-B-16", "fastclip-v3", 768),
    Case("ViT-B-32", "infonce", 4096, micro=1024, checkpointing=True, compile="off"),
    Case("ViT-B-32", "fastclip-v2", 4096, checkpointing=6),
    Case("RN50", "fastclip-v3", 512, compile="off"),
    Case("convnext_base", "fastclip-v3", 256, compile="off"),
    Case("small-64px", "infonce", 128),
    Case("ViT-B-32", "fastclip-v3", 4096, micro=512),
    Case("ViT-L-14", "fastclip-v3", 256),
    Case("ViT-B-16", "siglip", 1024, checkpointing=True),
    Case("ViT-L-14", "infonce", 512, micro=128, compile="off"),
    Case("ViT-B-32", "siglip", 1024, compile="off", pad_text=True),
    Case("RN50", "infonce", 1024, micro=256, compile="off"),
    Case("ViT-B-16", "fastclip-v1", 512, checkpointing=4, compile="off"),
    Case("leanclip-tiny", "fastclip-v3", 128, compile="off"),
    Case("ViT-L-14", "fastclip-v3", 512, micro=256, checkpointing=12),
    Case("RN50", "infonce", 512),
)
QUICK = (Case("leanclip-tiny", "fastclip-v3", 32, micro=16, compile="off"),)
KEY = ("model", "loss", "batch", "micro_batch", "recomputed", "compile", "captions")
FIELDS: tuple[str, ...] = (
    "version", "torch", "device", *KEY, "predicted_gib", "measured_gib", "memory_error", "predicted_seconds",
    "measured_seconds", "time_error",
)  # fmt: skip


def predict(case: Case, gpu: GpuModel) -> tuple[float, float]:
    """GiB and seconds of a step."""
    step = predict_step(
        case.config(),
        samples=SAMPLES,
        parts=case.parts,
        capability=gpu.capability,
        processors=gpu.processors,
        caption_length=CAPTION,
    )
    return step.peak / 2**30, gpu.step(step)


def synthetic(model: TwoTower, batch: int, device: torch.device) -> Batch:
    tokens = model.tokenizer(["a"]).expand(batch, -1).contiguous()
    lengths = caption_lengths(batch, CAPTION, tokens.shape[1])
    place = torch.arange(tokens.shape[1])
    tokens = torch.randint(1, 40_000, tokens.shape) * (place < lengths[:, None])
    tokens[place == lengths[:, None] - 1] = 49_407
    return Batch(
        images=torch.randint(256, (batch, 3, *model.image_size), dtype=torch.uint8, device=device),
        tokens=tokens.to(device),
        sample_ids=torch.arange(batch),
        lengths=lengths,
    )


def steps_of(case: Case, device: torch.device) -> tuple[StepContext, Batch]:
    torch.manual_seed(0)
    config = case.config()
    model = model_for_run(config).to(device).train()
    if case.compile == "on":
        model.compile_towers()
    loss = loss_from_config(case.loss, config.loss, num_samples=SAMPLES).to(device)
    loss.set_epoch(0, 1)
    optimizer = create_optimizer(config.optim, [*weight_decay_groups(model, 0.1), *loss.param_groups()])
    autocast = torch.autocast("cuda", torch.bfloat16)
    one = Ranks(0, 1, None)
    cuda_graphs = (
        CudaGraphs(model, autocast) if case.parts == 1 and uses_cuda_graph(config, model, one, device) else None
    )
    context = StepContext(
        towers=model, loss=loss, optimizer=optimizer, global_batch=case.batch, micro_batches=case.parts,
        autocast=autocast, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    return context, synthetic(model, case.batch, device).pack(model.texts, case.parts)


def measure(case: Case, device: torch.device) -> tuple[float, float]:
    context, data = steps_of(case, device)
    training_step(context, data)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    peak, step_seconds = 0.0, 0.0
    for count in (4, None):  # the first four are not timed: a CUDA graph is captured after three
        count = count or max(2, min(50, round(1 / step_seconds)))
        began = time.perf_counter()
        for _ in range(count):
            assert not training_step(context, data).skipped
        torch.cuda.synchronize()
        step_seconds = (time.perf_counter() - began) / count
        peak = torch.cuda.max_memory_allocated() / 2**30
    return peak, step_seconds


def measure_all(cases: Iterable[Case], output: Path) -> None:
    output.unlink(missing_ok=True)
    for case in cases:
        began = time.perf_counter()
        gib, seconds = measure(case, torch.device("cuda"))
        free()
        row = case.row() | {
            "version": leanclip.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name(),
            "measured_gib": round(gib, 3), "measured_seconds": round(seconds, 5),
        }  # fmt: skip
        append(output, {field: row.get(field, "") for field in FIELDS})
        took = f"({time.perf_counter() - began:.0f} s)"
        print(*case.row().values(), f"{gib:.2f} GiB {seconds:.4f} s", took, flush=True)


def with_prediction(row: dict[str, Any], gpu: GpuModel) -> dict[str, Any]:
    gib, seconds = predict(Case.of(row), gpu)
    return row | {
        "predicted_gib": round(gib, 3), "memory_error": f"{gib / float(row['measured_gib']) - 1:+.3f}",
        "predicted_seconds": round(seconds, 5),
        "time_error": f"{seconds / float(row['measured_seconds']) - 1:+.3f}",
    }  # fmt: skip


def table(predicted: list[dict[str, Any]]) -> str:
    """The rows as the documentation shows them."""
    head = "| model | loss | batch | micro-batch | recomputed | compiled"
    lines = [f"{head} | GiB predicted / measured | | ms predicted / measured | |", "|---" * 10 + "|"]
    for row in predicted:
        guess, measured = (1e3 * float(row[f"{side}_seconds"]) for side in ("predicted", "measured"))
        padded = ", padded captions" if row["captions"] else ""
        lines.append(
            f"| {row['model']}{padded} | {row['loss']} | {int(row['batch']):,} | {row['micro_batch']}"
            f" | {row['recomputed']} | {'yes' if row['compile'] == 'on' else ''}"
            f" | {float(row['predicted_gib']):.2f} / {float(row['measured_gib']):.2f}"
            f" | {float(row['memory_error']):+.1%} | {guess:.1f} / {measured:.1f}"
            f" | {float(row['time_error']):+.1%} |"
        )
    return "\n".join(lines)


def write_docs(predicted: list[dict[str, Any]], path: Path = DOCS) -> None:
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{table(predicted)}\n{END}{after}")


def predict_all(output: Path, gpu: GpuModel) -> None:
    predicted = []
    for row in rows(output):
        predicted.append(with_prediction(row, gpu))
        print(*(predicted[-1][name] for name in FIELDS[3:]), flush=True)
    output.unlink()
    append(output, *predicted)
    if output == RESULTS:
        write_docs(predicted)


def main() -> None:
    predict_only = Flag(False, "only predict what was measured before")
    arguments = command_line(__doc__, predict=predict_only, output=RESULTS)
    gpu = read_gpu(REFERENCE) if arguments.quick or arguments.predict else measured_gpu(torch.device("cuda"))
    print(f"{gpu.name}: {gpu.matrix_rate / 1e12:.0f} TFLOP/s, {gpu.bandwidth / 1e12:.2f} TB/s", flush=True)
    if arguments.quick:
        for case in QUICK:
            gib, seconds = predict(case, gpu)
            print(case.row() | {"predicted_gib": gib, "predicted_seconds": seconds})
        return
    if not arguments.predict:
        measure_all(CASES, arguments.output)
    predict_all(arguments.output, gpu)


if __name__ == "__main__":
    main()
