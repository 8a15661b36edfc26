"""The planner: what a trace counts, what fits, and whether published batch sizes fit."""

import csv
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from leanclip.cli.plan import BYTES_PER_PAIR
from leanclip.data import DataConfig
from leanclip.distributed import TrafficCounter, compare_traffic
from leanclip.losses import LOSSES, ContrastiveLoss, LossOutput, create_loss
from leanclip.models import ModelConfig, create_model
from leanclip.ops import tiled
from leanclip.ops.triton import configs
from leanclip.planning import compiled_cost, simulated_gpu
from leanclip.planning import step_prediction as predict
from leanclip.planning.compiled_cost import traced_compile
from leanclip.planning.gpu_model import GPUS, REFERENCE, gpu_named, read_gpu
from leanclip.planning.network import NETWORKS
from leanclip.planning.planner import SMALL_MICRO_BATCH, USABLE, Planner
from leanclip.planning.step_prediction import Predicted, loss_memory, predict_step
from leanclip.planning.step_trace import Kernel, faked, tracing
from leanclip.runs.config import ParallelConfig, Precision, RunConfig, TrainConfig
from refusal import refuses

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30


def rows_of(name):
    return list(csv.DictReader((RESULTS / name).read_text().splitlines()))


def config_of(model="leanclip-tiny", batch=64, *, loss="fastclip-v3", precision: Precision = "amp_bf16", **parallel):
    """Not compiled by default: a trace takes half the time."""
    parallel.setdefault("compile", "off")
    return TrainConfig(
        model=ModelConfig(model=model),
        data=DataConfig(global_batch_size=batch),
        run=RunConfig(loss=loss, precision=precision),
        parallel=ParallelConfig(**parallel),
    )


def test_a_trace_counts_storages_and_kernels():
    with tracing() as trace:
        a = torch.empty(256, 512, dtype=torch.bfloat16, requires_grad=True)
        b = torch.empty(512, 1024, dtype=torch.bfloat16)
        assert trace.total == a.nbytes + b.nbytes
        trace.start_again()
        (a @ b).sum().backward()
        assert a.grad is not None
        left = trace.total
        assert left == 2 * a.nbytes + b.nbytes
        assert float(a.detach().sum()) == 1.0  # what is read from the device
    products = Counter({k.shape: n for k, n in trace.kernels.items() if k.kind == "matrix"})
    assert products == {(1, 256, 1024, 512): 1, (1, 256, 512, 1024): 1}
    assert all(k.flops == 2 * 256 * 512 * 1024 for k in trace.kernels if k.kind == "matrix")
    # The product, its sum and the gradient of both live at the same time at most.
    assert a.nbytes + b.nbytes + 256 * 1024 * 2 <= trace.peak <= left + 2 * 256 * 1024 * 2 + 4096


class Dtypes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, torch.Tensor) and not func.is_view and "attention" not in str(func):
            self.seen.append((str(func.overloadpacket), tuple(first.shape), first.dtype))
        return out


def plain(towers, images, tokens):
    """As `predict` runs them: open_clip's own code."""
    towers.clip.encode_image(towers.normalised(images), normalize=True)
    towers.clip.encode_text(tokens, normalize=True)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch knows CUDA's autocast in a CUDA build only")
@pytest.mark.parametrize("model", ["ViT-B-32", pytest.param("RN50", marks=pytest.mark.slow)])
def test_autocast_decides_as_on_cuda(model, monkeypatch):
    """A forward pass on tensors that say they are on a GPU, against one under the stand-in: every dtype the same."""
    expected, traced = Dtypes(), Dtypes()
    tokens = torch.zeros(2, 77, dtype=torch.int64)
    towers = create_model(ModelConfig(model=model), shapes_only=True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for inner in towers.modules():
            for held in (inner._parameters, inner._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                        held[name] = torch.nn.Parameter(made) if held is inner._parameters else made  # pyright: ignore
        # torch.autocast itself insists on a GPU.
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        with expected, torch.autocast("cuda", torch.bfloat16):
            plain(towers, torch.empty(2, 3, 224, 224, dtype=torch.uint8, device="cuda"), tokens.to("cuda"))
        monkeypatch.undo()
    towers = create_model(ModelConfig(model=model), shapes_only=True)
    with tracing() as trace, torch.no_grad():
        towers = faked(towers, trace, "weights")
        with traced, torch.autocast("cpu", torch.bfloat16):
            plain(towers, torch.empty(2, 3, 224, 224, dtype=torch.uint8), torch.empty(2, 77, dtype=torch.int64))

    def decided(seen):
        """Without attention itself, which runs unfused where there is no GPU."""
        names = ("mm", "addmm", "convolution", "native_layer_norm", "gelu", "linalg_vector_norm", "div", "relu_")
        return Counter(entry for entry in seen if entry[0].removeprefix("aten.") in names)

    assert decided(traced.seen) == decided(expected.seen)
    assert len(traced.seen) > 100


@pytest.mark.parametrize("parts", [4, 7])
def test_micro_batches_that_are_charged_count_as_if_traced(parts, monkeypatch, small_model):
    ranks = 3
    config = config_of(small_model, 40 * ranks)
    short = predict_step(config, samples=1000, ranks=ranks, parts=parts)
    monkeypatch.setattr(predict, "TRACED", 99)
    whole = predict_step(config, samples=1000, ranks=ranks, parts=parts)
    assert short.kernels.total() == whole.kernels.total()
    if 40 % parts == 0:
        assert short.kernels == whole.kernels
    work = [sum(k.flops * n for k, n in found.kernels.items()) for found in (short, whole)]
    assert work[0] == pytest.approx(work[1], rel=0.06)  # where they are not alike, the second stands for the rest
    assert short.peak == pytest.approx(whole.peak, rel=0.001)
    assert short.sent.volumes == whole.sent.volumes


def test_the_time_of_a_trace_does_not_depend_on_micro_batches(monkeypatch, small_model):
    """The largest batch of small images is in the millions."""
    packed = []
    real = predict._packed
    monkeypatch.setattr(predict, "_packed", lambda *given: packed.append(1) or real(*given))
    predict_step(config_of(small_model, 300 * 8), samples=10_000, parts=300, caption_length=12)
    assert len(packed) == predict.TRACED
    planner = Planner(samples=12_000_000, ranks=4, gpu=gpu_named("H100"), room=60 * GIB)
    assert 4_000_000 < planner.largest_batch(config_of(small_model, micro_batch=512)) < 12_000_000


def test_memory_by_part():
    """Weights, gradients, AdamW's two moments and the tables follow from the model alone, on one rank and on many."""
    model = create_model(ModelConfig(model="leanclip-tiny"), shapes_only=True)
    weights = sum(p.nbytes for p in model.parameters())
    for ranks in (1, 4):
        found = predict_step(config_of(batch=64), samples=4_000_000, ranks=ranks)
        assert found.memory["weights"] == pytest.approx(weights, rel=0.01)
        assert found.memory["optimizer"] == pytest.approx(2 * weights, rel=0.02)
        assert found.memory["state tables"] == pytest.approx(2 * 4 * 4_000_000 / ranks, rel=0.01)
        assert found.memory["batch"] == 64 // ranks * 3 * math.prod(model.image_size)
    assert found.memory["gradients"] >= weights * 0.99  # of several ranks: DDP's buckets stay
    split = predict_step(config_of(batch=64, fsdp=True), samples=4_000_000, ranks=4)
    assert split.memory["weights"] < 0.3 * found.memory["weights"]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_can_be_traced(loss):
    found = predict_step(config_of(batch=32, loss=loss), samples=1000, ranks=2)
    assert found.peak > 0 and any(kernel.phase == "loss" for kernel in found.kernels)
    assert found.sent.loss_total().bytes >= 2 * 32 * 128 * 2  # the embeddings of all ranks


def test_every_precision_can_be_traced(small_model):
    peaks = [
        predict_step(config_of(small_model, 512, precision=precision), samples=1000).memory["activations"]
        for precision in ("amp", "fp32", "fp64")
    ]
    assert 1.3 * peaks[0] < peaks[1] and 1.8 * peaks[1] < peaks[2]


def test_loss_memory_equals_the_measured_one():
    """Against the peaks that benchmarks/bench_loss.py found on an H200."""
    rows = [row for row in rows_of("loss.csv") if row["provider"] == "leanclip"]
    rows = [row for row in rows if int(row["batch"]) >= 8192 and row["loss"] in ("infonce", "siglip", "fastclip-v3")]
    assert len(rows) >= 8
    for row in rows:
        batch = int(row["batch"])
        count = batch if row["loss"].startswith("fast") else None
        taken = loss_memory(
            lambda name=row["loss"], count=count: create_loss(name, num_samples=count),
            batch=batch,
            ranks=1,
            dim=int(row["dim"]),
        )
        # Summing siglip's partial sums takes memory that the traced engine does not count.
        assert taken / 2**20 == pytest.approx(float(row["extra_mib"]), rel=0.15 if row["loss"] == "siglip" else 0.06)


def test_traced_loss_kernels_have_the_tiles_of_the_real_ones():
    for kernel in ("statistics", "weights", "pairwise"):
        config = configs.config(kernel, 90)
        assert config.block_r == config.block_c == simulated_gpu.TILE


class DenseInfoNCE(ContrastiveLoss):
    """As OpenCLIP computes it: similarities are held, autograd computes the backward pass.

    Undivided, every rank has the whole B x B matrix in both directions; divided (--local-loss, DisCo-CLIP) B/N x B.
    """

    def __init__(self, *, divided):
        super().__init__(name="dense", implementation="auto", lr_tau=None, follows_schedule=True)
        self.divided = divided
        self.scale = torch.nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def compute(self, local, sample_ids, text_ids):
        sides, gathered = (local.image, local.text), local.gathered()
        if self.divided:
            images, texts = (side.requires_grad_() for side in gathered)  # whose gradients are sent
        else:  # the rows of this rank keep their gradients
            sides = images, texts = [
                torch.cat([side, others[len(side) :]]) for side, others in zip(sides, gathered, strict=True)
            ]
        labels, total = torch.arange(len(sides[0])), torch.zeros(())
        for rows, cols in zip(sides, (texts, images), strict=True):
            logits = (self.scale.exp() * rows).to(rows.dtype) @ cols.T
            # As under autocast: logits in 16 bits, their logarithms in float32.
            logarithms = torch.nn.functional.log_softmax(logits, 1, dtype=torch.float32)
            total = total + torch.nn.functional.nll_loss(logarithms, labels) / 2
        return LossOutput(loss=total, metrics={})

    def temperature(self):
        return (-self.scale.detach()).exp()


def test_the_dense_loss_is_infonce():
    torch.manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(12, 8), dim=1) for _ in range(2))
    expected = float(create_loss("infonce", tau=0.07)(image, text).loss.detach())
    for divided in (False, True):
        assert float(DenseInfoNCE(divided=divided)(image, text).loss.detach()) == pytest.approx(expected, rel=1e-5)


A100 = {"samples": 400_000_000, "capability": (8, 0), "processors": 108}


@pytest.mark.parametrize(("batch", "gpus"), [(32_768, 8), pytest.param(196_608, 64, marks=pytest.mark.slow)])
def test_published_batches_of_disco_clip_fit_on_40_gb(batch, gpus):
    """ViT-B-32: 32K on 8 and 196K on 64 GPUs of 40 GB, the share of each at once, blocks recomputed.

    As its authors ran it: captions padded, nothing compiled.
    """
    config = config_of("ViT-B-32", batch, loss="infonce", grad_checkpointing=True, pad_text=True)
    own = predict_step(config, ranks=gpus, **A100)
    divided = predict_step(config, ranks=gpus, **A100, make_loss=lambda: DenseInfoNCE(divided=True))
    assert own.peak <= divided.peak < USABLE * 40e9
    alone = [
        loss_memory(lambda d=divided: DenseInfoNCE(divided=d), batch=batch, ranks=gpus, dim=512)
        for divided in (False, True)
    ]
    assert alone == pytest.approx([BYTES_PER_PAIR * batch**2, BYTES_PER_PAIR * batch**2 / gpus], rel=0.1)
    if batch == 196_608:
        assert alone[0] > 10 * 40e9


@pytest.mark.slow
def test_the_undivided_loss_needs_128_gpus_for_32k():
    """As DisCo-CLIP says of CLIP's own way, with all activations kept: 128 GPUs of 40 GB do, 64 do not."""
    config = config_of("ViT-B-32", 32_768, loss="infonce", pad_text=True)
    few, many = (
        predict_step(config, ranks=gpus, **A100, make_loss=lambda: DenseInfoNCE(divided=False)).peak
        for gpus in (64, 128)
    )
    assert many < USABLE * 40e9 < few


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits(small_model):
    config = config_of(small_model, 2000)
    planner = Planner(samples=1000, ranks=2, gpu=gpu_named("H200"), room=0)

    def largest(room):
        planner.room = room
        return planner.largest_micro_batch(config)

    whole = planner.step(config, 1000)
    assert whole.needed == whole.peak + 1000 * 3 * 64 * 64 + whole.resizing  # with the pixels of the next batch
    assert largest(whole.needed) == 1000 > largest(whole.needed - 1)
    micro = largest(whole.needed - whole.memory["activations"] * 2 // 3)
    assert 8 <= micro < 1000 and micro % 8 == 0
    assert planner.fits(config, micro) and not planner.fits(config, 2 * micro)
    assert largest(whole.needed // 1000) == 0


def test_a_plan_takes_few_traces(small_model):
    planner = Planner(samples=10**7, ranks=2, gpu=gpu_named("A10"), room=3 * GIB)
    config = config_of(small_model, 4096)
    assert len(list(planner.options(config))) == len(planner.traced) == 1
    largest = planner.largest_batch(config)
    assert len(planner.traced) <= 4
    data = replace(config.data, global_batch_size=largest)
    assert 0.99 * planner.room < planner.step(replace(config, data=data), SMALL_MICRO_BATCH).needed <= planner.room
    assert planner.largest_batch(replace(config, data=data)) == largest  # whatever the batch that is planned


@pytest.mark.slow
def test_the_fastest_way_that_fits_and_the_largest_batch(small_model):
    config = config_of(small_model, 4096)
    planner = Planner(samples=30_000, ranks=2, gpu=gpu_named("RTX3090"), network=NETWORKS["pcie"], room=80 * GIB)
    (free,) = planner.options(config)
    assert free.step.parts == 1
    planner.room = free.step.peak // 2
    tight = list(planner.options(config))
    assert [bool(option.config.parallel.grad_checkpointing) for option in tight] == [False, True]
    for option in tight:
        assert option.step.needed <= planner.room and option.seconds > free.seconds
        assert 0 < option.exposed <= option.communication
    planner.room = 8 * GIB
    largest = planner.largest_batch(config_of(small_model, 4096, micro_batch=512))
    assert largest % 2048 == 0 and 4096 <= largest <= 30_000


def test_time_of_collectives_on_a_ring():
    network = NETWORKS["infiniband"]
    assert network.gather(1e9, 1) == 0.0
    size = 1e9
    assert network.gather(size, 8) == pytest.approx(size * 7 / 8 / (0.8 * 300e9), rel=0.01)
    assert network.gather(size, 16) > network.gather(size, 8)
    assert network.sum(size, 16) == 2 * network.gather(size, 16)
    slow = NETWORKS["25gbe"]
    assert slow.gather(size, 16) == pytest.approx(size * 15 / 16 / (0.8 * 3.125e9), rel=0.01)
    assert slow.gather(size, 8) == network.gather(size, 8)  # within a host


def test_gpu_models():
    reference = read_gpu(REFERENCE)
    assert reference.measured and 7e14 < reference.matrix_rate < 9e14 and 4e12 < reference.bandwidth < 4.8e12
    big = Kernel("matrix", "backward", 2 * 8192**3, 3 * 2 * 8192**2, 2, (1, 8192, 8192, 8192))
    assert reference.seconds(big) == pytest.approx(2 * 8192**3 / reference.matrix_rate, rel=0.02)
    moved = Kernel("elementwise", "backward", 0, 10**9, 4)
    assert reference.seconds(moved) > 1e9 / reference.bandwidth
    times = [gpu_named(name).seconds(big) for name in GPUS]
    assert all(math.isfinite(time) for time in times) and min(times) == gpu_named("h200").seconds(big)
    with refuses("plan.unknown_gpu", "H300", "RTX4090"):
        gpu_named("H300")


def test_a_prediction_of_the_accuracy_table():
    """Of the step as it runs by default: compiled, captions packed."""
    row = rows_of("plan.csv")[0]
    assert row["compile"] == "on" and not row["captions"]
    config = config_of(row["model"], int(row["batch"]), loss=row["loss"], compile="on")
    found = predict_step(config, samples=10**6, caption_length=15.5)
    assert found.peak / GIB == pytest.approx(float(row["measured_gib"]), rel=0.08)
    assert read_gpu(REFERENCE).step(found) == pytest.approx(float(row["measured_seconds"]), rel=0.2)


def run_mlp(block, x):
    return x + block(x)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own
def test_compiled_code_keeps_what_the_compiler_keeps():
    """Against what PyTorch's own ahead-of-time autograd saves, with the same partitioner, on real tensors."""
    block = torch.nn.Sequential(
        torch.nn.LayerNorm(32), torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)
    )
    x = torch.randn(64, 32, requires_grad=True)
    known = {tensor.data_ptr() for tensor in (x, *block.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor):
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    compiled = torch.compile(run_mlp, backend="aot_eager_decomp_partition")
    compiled(block, x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        real = compiled(block, x)
    with tracing() as trace:
        fake = faked(block, trace, "weights")
        given = torch.empty(64, 32, requires_grad=True)
        before = trace.total
        out = traced_compile(run_mlp)(fake, given)
        # Both the output and what is kept are alive.
        found = trace.total - before - out.nbytes
        out.sum().backward()
        assert given.grad is not None and all(parameter.grad is not None for parameter in fake.parameters())
    assert real.shape == out.shape
    assert found == sum(-(-size // 512) * 512 for size in kept.values()) > 0


def between(x, y, wide, bias, gain, shift):
    x = x + (y + bias)
    return x, torch.nn.functional.layer_norm(x, gain.shape, gain, shift).to(y.dtype), torch.nn.functional.gelu(wide)


def test_fused_operations_move_inputs_and_outputs_once():
    rows, size = 512, 64
    with tracing() as trace:
        shapes = [((rows, size), torch.float32), ((rows, size), torch.bfloat16), ((rows, 4 * size), torch.bfloat16)]
        shapes += [((size,), dtype) for dtype in (torch.bfloat16, torch.float32, torch.float32)]
        given = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape, dtype in shapes]
        trace.start_again()
        out = traced_compile(between)(*given)
        trace.enter("backward")
        torch.autograd.grad(out, given, [torch.empty_like(each) for each in out])
    # Bytes for each element of a row: the sum and its norm, gelu; then gelu's gradient, the norm's, and the sums.
    moved = [(k.kind, k.phase, round(k.bytes / (rows * size))) for k, n in trace.kernels.items() for _ in range(n)]
    assert sorted(moved) == [
        ("fused", "backward", 16), ("fused", "backward", 24), ("fused", "other", 12), ("fused", "other", 16),
        ("fused sums", "backward", 8),
    ]  # fmt: skip


def test_compiled_code_is_traced_once_for_all_batch_sizes(small_model, monkeypatch):
    """And gives at every size what a trace at that size gives, whole or in micro-batches."""
    traced = []
    real = compiled_cost._compile
    monkeypatch.setattr(compiled_cost, "_compile", lambda *call: traced.append(1) or real(*call))

    def step(parts):
        return predict_step(config_of(small_model, 1024, compile="on"), samples=3000, caption_length=9, parts=parts)

    monkeypatch.setattr(compiled_cost, "PROGRAMS", {})
    apart = step(1), step(3)
    monkeypatch.setattr(compiled_cost, "PROGRAMS", {})
    predict_step(config_of(small_model, 300, compile="on"), samples=3000, caption_length=9)
    count = len(traced)
    assert step(1) == apart[0]
    assert len(traced) == count
    assert step(3) == apart[1]


def test_compiling_recomputing_and_packing_need_less(small_model):
    """Compiled code keeps less, as does one recomputed block, and captions without padding."""
    asked: dict[str, Any] = {"samples": 3000, "caption_length": 12}
    eager = predict_step(config_of(small_model, 2048, graph="off"), **asked)
    compiled, one, both = (
        predict_step(config_of(small_model, 2048, compile="on", grad_checkpointing=number), **asked)
        for number in (False, 1, True)
    )
    activations = [step.memory["activations"] for step in (both, one, compiled, eager)]
    assert activations == sorted(activations) and activations[0] < 0.9 * activations[2]
    padded = predict_step(config_of(small_model, 2048, pad_text=True), **asked)
    assert padded.memory["activations"] > 1.5 * eager.memory["activations"]
    assert compiled.cuda_graph and not eager.cuda_graph
    flops = [sum(kernel.flops * n for kernel, n in step.kernels.items()) for step in (compiled, one, both)]
    assert flops == sorted(set(flops))


def test_the_host_can_be_slower_than_the_device():
    """Compiled, as a CUDA graph or neither; and the device waits while the optimizer is launched."""
    gpu, host = read_gpu(REFERENCE), read_gpu(REFERENCE).host
    phases = ("image tower", "backward", "loss")
    kernels = Counter({Kernel("elementwise", phase, 0, 512, 4): 1000 for phase in phases})
    fixed: dict[str, Any] = {"memory": {}, "sent": TrafficCounter(), "trained_bytes": 0, "parts": 1}
    eager, compiled, graph = (
        Predicted(kernels=kernels, parameters=100, compiled=way == 1, cuda_graph=way == 2, **fixed)
        for way in range(3)
    )
    rest = 1000 * host.forward + 100 * (host.norm + host.optimizer)
    assert gpu.step(eager) == pytest.approx(1000 * (host.forward + host.backward) + rest)
    assert gpu.step(compiled) == pytest.approx(2000 * host.compiled + rest)
    assert gpu.launching(graph) == pytest.approx(100 * host.norm)  # the graph contains the loss
    assert gpu.step(graph) == pytest.approx(sum(gpu.times(kernels).values()) + 100 * host.optimizer)


def test_traffic_of_a_traced_step():
    """2 B d embeddings in 16 bits, and numbers that are few beside them."""
    found = predict_step(config_of(batch=1024, loss="infonce"), samples=1000, ranks=4)
    assert found.sent.volumes["embeddings"].bytes == 2 * 1024 * 128 * 2
    sent = compare_traffic(found.sent, ranks=4)
    assert sent.openclip < sent.disco_clip and sent.leanclip < sent.openclip


def test_a_trace_asks_fake_tensors_little(small_model, monkeypatch):
    """They take most of a plan's time. Bounded in questions per weight, since time cannot be tested."""
    config = config_of(small_model, 256, compile="on")
    step = predict_step(config, samples=3000, caption_length=9)  # compiled for the trace once
    asked = Counter()
    real = FakeTensorMode.dispatch
    monkeypatch.setattr(FakeTensorMode, "dispatch", lambda mode, *call: asked.update([call[0]]) or real(mode, *call))
    assert predict_step(config, samples=3000, caption_length=9) == step
    assert asked.total() < 8 * step.parameters
    assert not {str(operator) for operator in asked} & {"aten.empty_strided.default", "aten._fused_adamw_.default"}


@pytest.mark.parametrize("loss", ["fastclip-v3", "siglip"])
def test_a_row_of_tiles_stands_for_all_later_ones(loss, small_model, monkeypatch):
    monkeypatch.setattr(tiled, "GPU_TILE_BYTES", 1 << 20)
    predicted = []
    for all_rows in (False, True):
        if all_rows:
            monkeypatch.setattr(
                simulated_gpu, "two_rows_of_tiles", lambda trace, real, pairs, buffers: real(pairs, buffers=buffers)
            )
        step = predict_step(config_of(small_model, 1500, loss=loss, precision="fp32"), samples=5000)
        flops = sum(number * kernel.flops for kernel, number in step.kernels.items())
        predicted.append((step.needed, sum(step.kernels.values()), pytest.approx(flops, rel=0.01)))
    assert predicted[0] == predicted[1]


def test_a_loss_in_float32_is_traced_in_the_tiles_of_a_gpu(small_model, monkeypatch):
    """Those of a CPU are a sixteenth, and a plan took minutes for all of them."""
    tiles = []
    real = tiled._tile_shape
    monkeypatch.setattr(tiled, "_tile_shape", lambda *sizes: tiles.append(real(*sizes)) or tiles[-1])
    predict_step(config_of(small_model, 4096, precision="fp32"), samples=5000, parts=64)
    assert tiles and set(tiles) == {(4096, 4096)}
