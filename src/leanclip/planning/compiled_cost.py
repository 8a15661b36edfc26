"""What `torch.compile` makes of a function, as a trace sees it.

Both passes are traced into one graph with the compiler's own decompositions and cut by its own partitioner: what is
kept for the backward pass is what compiled code keeps. Products, attention, convolutions and the like are kernels of
their own, as ever. All between them is fused: of a group of connected operations only those results exist that
another kernel or the caller reads, each input is read once, and once more for every sum over rows.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from leanclip.planning.cuda_autocast import without_autocast
from leanclip.planning.step_trace import Kernel, Trace, bytes_of

aten, prims = torch.ops.aten, torch.ops.prims
FUSED = (  # beside all that PyTorch itself marks as pointwise
    aten.sum, aten.mean, aten.var_mean, aten.var, aten.amax, aten.amin, aten.any, prims.convert_element_type,
    aten._to_copy, aten.clone, aten.cat, aten.full, aten.full_like, aten.zeros, aten.zeros_like, aten.ones,
    aten.scalar_tensor, aten.arange, prims.iota, aten.index, aten.gather, aten.embedding, aten.select_scatter,
    aten.slice_scatter, aten.constant_pad_nd, aten.avg_pool2d, aten.avg_pool2d_backward,
)  # fmt: skip
SUMS = (aten.sum, aten.mean, aten.var_mean, aten.var)
VIEWS = (aten._unsafe_view, aten.reshape, aten.alias, aten.detach)
MANY = 4096  # elements that are summed up at the least where a sum over rows counts


KNOWN: dict[Any, "Both | Program"] = {}  # by function and form of the arguments
MOST_KNOWN = 200


class Compiler:
    """Stands for `torch.compile`: calls of a function on arguments of the same form share one program."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self._call, function)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        flat = _Flat(function, args)
        trained = torch.is_grad_enabled() and any(value.requires_grad for value in flat.values)
        casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        key = (function, trained, casts, self.trace.capability, *flat.form)
        if key not in KNOWN:
            if len(KNOWN) == MOST_KNOWN:
                KNOWN.clear()
            KNOWN[key] = _both(flat) if trained else _forward(flat)
        program = KNOWN[key]
        if isinstance(program, Both):
            found: Any = _Compiled.apply(program, self.trace, *flat.values)
        else:
            found = program.run(self.trace, list(flat.values))
        return found[0] if len(found) == 1 else tuple(found)


class _Flat:
    """A call as a function of tensors alone: the weights of its modules, then its own tensors."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        leaves, spec = tree_flatten(args)
        modules = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, nn.Module)}
        inside = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        holder = nn.Module()
        for at, module in modules.items():
            holder.add_module(str(at), module)
        with _without_side_effects(holder):
            weights = dict(holder.named_parameters()) | dict(holder.named_buffers())
        count = self.weights = len(weights)
        self.values = [*weights.values(), *(leaves[at] for at in inside)]
        rest = [leaf for leaf in leaves if not isinstance(leaf, Tensor | nn.Module)]
        self.form = (
            *(repr(module) for module in modules.values()),
            *((value.shape, value.dtype, value.requires_grad) for value in self.values), repr(rest), str(spec),
        )  # fmt: skip

        def call(*values: Tensor) -> list[Tensor]:
            given = list(leaves)
            for at, value in zip(inside, values[count:], strict=True):
                given[at] = value
            holder.forward = lambda: function(*tree_unflatten(given, spec))
            found = torch.func.functional_call(holder, dict(zip(weights, values, strict=False)), ())
            del holder.forward  # which holds what was given
            return [found] if isinstance(found, Tensor) else list(found)

        self.call, self.holder = call, holder

    @contextlib.contextmanager
    def apart(self) -> Iterator[list[Tensor]]:
        """Inside, nothing is noted or cached; gives tensors like the values, leaves of a graph of their own."""
        mode = next(value.fake_mode for value in self.values if isinstance(value, FakeTensor))
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with (
                _disable_current_modes(),
                mode,
                _without_side_effects(self.holder),
                saved_tensors_hooks(_same, _same),
            ):
                yield [_new(value).requires_grad_(value.requires_grad) for value in self.values]
        finally:
            torch.set_autocast_cache_enabled(cached)


def _graph(function: Callable[..., Any], *given: Any) -> GraphModule:
    """With the decompositions of the compiler."""
    from torch._inductor.decomposition import select_decomp_table  # the compiler takes a second to import

    return _functional(make_fx(function, select_decomp_table(), _allow_non_fake_inputs=True)(*given))


def _functional(made: GraphModule) -> GraphModule:
    """Sums that were written in place (`x += y`) as new ones, which the later readers get."""
    for node in made.graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        changed = node.args[0]
        assert isinstance(changed, Node)
        node.target = aten.add.Tensor
        changed.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: user > node)
    made.recompile()
    return made


def _same(value: Tensor) -> Tensor:
    """Shields from the hooks of a block that is recomputed."""
    return value


@contextlib.contextmanager
def _without_side_effects(module: nn.Module) -> Iterator[None]:
    """No layer writes in place, which the compiler undoes, and batch norms learn nothing, which is small."""
    named = ("running_mean", "running_var", "num_batches_tracked")
    before: list[tuple[nn.Module, str, Any]] = []
    for inner in module.modules():
        changed: dict[str, Any] = dict.fromkeys(named) if isinstance(inner, _BatchNorm) else {}
        changed |= {"inplace": False} if getattr(inner, "inplace", False) is True else {}
        before += [(inner, name, getattr(inner, name)) for name in changed]
        for name, value in changed.items():
            setattr(inner, name, value)
    try:
        yield
    finally:
        for inner, name, value in before:
            setattr(inner, name, value)


def _forward(flat: _Flat) -> "Program":
    with flat.apart() as values:
        return Program(_graph(flat.call, *values).graph)


class Both(NamedTuple):
    """The two passes."""

    outputs: int
    forward: "Program"
    backward: "Program"


def _both(flat: _Flat) -> Both:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Any]:
        found = flat.call(*primals)
        wanted = [value for value in primals if value.requires_grad]
        gradients = iter(torch.autograd.grad(found, wanted, tangents, allow_unused=True))
        return [*found, *(next(gradients) if value.requires_grad else None for value in primals)]

    with flat.apart() as values:
        with torch.no_grad():
            outputs = flat.call(*values)
        graph = _graph(joint, values, outputs)
    forward, backward = min_cut_rematerialization_partition(
        graph, None, num_fwd_outputs=len(outputs), static_lifetime_input_indices=list(range(flat.weights))
    )
    return Both(len(outputs), Program(forward.graph), Program(backward.graph))


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Both, trace: Trace, *values: Tensor) -> Any:
        ctx.both, ctx.trace = both, trace
        with without_autocast():
            found = both.forward.run(trace, list(values))
        ctx.save_for_backward(*found[both.outputs :])
        return tuple(found[: both.outputs])

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> Any:
        given = [*ctx.saved_tensors, *(pull.contiguous() for pull in pulls)]
        ctx.maybe_clear_saved_tensors()
        return None, None, *ctx.both.backward.run(ctx.trace, given)


class Program:
    """A graph as kernels in an order that can be run, and what each makes and needs for the last time."""

    def __init__(self, graph: Graph) -> None:
        self.given = graph.find_nodes(op="placeholder")
        self.outputs: Any = graph.output_node().args[0]
        self.depth: dict[Node, int] = {}
        groups = _Groups()
        alone: list[Node] = []
        for node in graph.nodes:
            if node.op not in ("call_function", "placeholder"):
                continue
            inputs = [root(each) for each in node.all_input_nodes]
            below = max((self.depth[each] for each in inputs), default=0)
            if node.op == "placeholder" or is_view(node):
                self.depth[node] = below
            elif is_fused(node):
                self.depth[node] = below
                near = [each for each in inputs if is_fused(each) and self.depth[each] == below]
                groups.join(node, [each for each in near if not is_constant(each)])
            else:
                self.depth[node] = below + 1
                alone.append(node)
        read = self._read_elsewhere(groups)
        fused = [group for group in groups.all() if any(node in read for node in group)]
        self.steps = _ordered([*alone, *(Fusion.of(group, read) for group in fused)], graph)
        self.dies = self._last_uses()

    def _read_elsewhere(self, groups: "_Groups") -> set[Node]:
        """Results of fused operations that must exist."""
        found = {root(node) for node in self.outputs if isinstance(node, Node)}
        for node in self.depth:
            if node.op == "placeholder" or is_view(node):
                continue
            for each in map(root, node.all_input_nodes):
                if not is_fused(node) or not (is_constant(each) or groups.of(each) is groups.of(node)):
                    found.add(each)
        return {node for node in found if is_fused(node)}

    def _last_uses(self) -> list[list[Node]]:
        kept = {root(node) for node in self.outputs if isinstance(node, Node)}
        last: dict[Node, int] = {}
        for at, step in enumerate(self.steps):
            last |= dict.fromkeys([*_made(step), *_used(step)], at)
        dies: list[list[Node]] = [[] for _ in self.steps]
        for node, at in last.items():
            if node not in kept:
                dies[at].append(node)
        return dies

    def run(self, trace: Trace, values: list[Tensor]) -> list[Tensor | None]:
        """Allocate as the kernels would, and note them. Empties `values`, so that they can die when used."""
        held: dict[Node, Any] = dict(zip(self.given, values, strict=True))
        values.clear()
        for step, dying in zip(self.steps, self.dies, strict=True):
            if isinstance(step, Fusion):
                step.run(trace, held, dying)
            else:
                held[step] = _call(step, held)
            for node in dying:
                held.pop(node, None)
        return [_value(node, held) if isinstance(node, Node) else None for node in self.outputs]


def _value(node: Node, held: dict[Node, Any]) -> Any:
    return held[node] if node in held or not is_view(node) else _call(node, held)


def _call(node: Node, held: dict[Node, Any]) -> Any:
    args, kwargs = (
        tree_map(lambda leaf: _value(leaf, held) if isinstance(leaf, Node) else leaf, given)
        for given in (node.args, node.kwargs)
    )
    target: Any = node.target
    return target(*args, **kwargs)


class Fusion(NamedTuple):
    """One group of fused operations."""

    reads: list[Node]
    writes: list[Node]
    kernels: list[tuple[str, int]]  # kind and bytes

    @classmethod
    def of(cls, group: list[Node], read: set[Node]) -> "Fusion":
        inside, writes = set(group), {node: None for node in group if node in read}
        sums = {node: None for node in group if over_rows(node)}

        def inputs(node: Node) -> dict[Node, None]:
            """What is read of memory for a result: of what is fused, sums over rows, and for such what is there."""
            found: dict[Node, None] = {}
            waiting, met = [node], {node}
            while waiting:
                for each in map(root, waiting.pop().all_input_nodes):
                    if each in met or is_constant(each):
                        continue
                    met.add(each)
                    if each not in inside or each in sums or (node in sums and each in writes):
                        found[each] = None
                    else:
                        waiting.append(each)
            return found

        parts = [({node: None}, inputs(node)) for node in sums]
        for at in range(len(parts) - 1, 0, -1):  # sums of the same rows are one kernel
            made, given = parts[at]
            near = next(
                (part for part in parts[:at] if any(size(each) >= MANY and each in given for each in part[1])), None
            )
            if near is not None:
                near[0].update(made)
                near[1].update(given)
                del parts[at]
        kernels = [("fused sums", sum(map(size, {**made, **given}))) for made, given in parts]
        if main := {node: None for node in writes if node not in sums}:
            given = {each: None for node in main for each in inputs(node)}
            kernels.append(("fused", sum(map(size, {**main, **given}))))
            parts.append((main, given))
        reads = {each: None for _, given in parts for each in given if each not in inside}
        return cls(list(reads), list(writes), kernels)

    def run(self, trace: Trace, held: dict[Node, Any], dying: list[Node]) -> None:
        spare = [node for node in dying if node in held and node in self.reads]
        for node in self.writes:
            over = next((each for each in spare if size(each) == size(node)), None)
            if over is not None:  # written in the place of what dies
                spare.remove(over)
                held.pop(over)
            held[node] = tree_map(_new, node.meta["val"])
        for kind, moved in self.kernels:
            trace.launch(Kernel(kind, trace.now, 0, moved, 4))


def _new(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)


def _made(step: Node | Fusion) -> list[Node]:
    return step.writes if isinstance(step, Fusion) else [step]


def _used(step: Node | Fusion) -> list[Node]:
    return step.reads if isinstance(step, Fusion) else [root(node) for node in step.all_input_nodes]


def _ordered(steps: list[Node | Fusion], graph: Graph) -> list[Node | Fusion]:
    """As they stand in the graph, each after what it reads."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    maker = {node: step for step in steps for node in _made(step)}
    steps = sorted(steps, key=lambda step: max(place[node] for node in _made(step)))
    found: dict[int, Node | Fusion] = {}
    for step in steps:
        waiting = [step]
        while waiting:
            missing = [maker[node] for node in _used(waiting[-1]) if node in maker and id(maker[node]) not in found]
            if missing:
                waiting.append(missing[0])
            else:
                done = waiting.pop()
                found[id(done)] = done
    return list(found.values())


class _Groups:
    """Sets of nodes that grow together."""

    def __init__(self) -> None:
        self.known: dict[Node, list[Node]] = {}

    def join(self, node: Node, others: Sequence[Node]) -> None:
        self.known[node] = [node]
        for other in others:
            small, large = sorted((self.known[node], self.known[other]), key=len)
            if small is not large:
                large += small
                self.known |= dict.fromkeys(small, large)

    def of(self, node: Node) -> list[Node] | None:
        return self.known.get(node)

    def all(self) -> list[list[Node]]:
        return list({id(group): group for group in self.known.values()}.values())


def root(node: Node) -> Node:
    """Whose memory it is."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    target: Any = node.target
    return target is operator.getitem or getattr(target, "is_view", False) or _packet(node) in VIEWS


def is_fused(node: Node) -> bool:
    if node.op != "call_function" or is_view(node):
        return False
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _packet(node) in FUSED


def is_constant(node: Node) -> bool:
    """Nobody reads it from memory who can be fused with it."""
    return is_fused(node) and not node.all_input_nodes


def over_rows(node: Node) -> bool:
    """Whether it sums many elements that do not lie side by side."""
    if _packet(node) not in SUMS:
        return False
    given: Any = node.all_input_nodes[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else range(given.ndim)
    dims = [dim % given.ndim for dim in dims]  # pyright: ignore[reportOperatorIssue, reportGeneralTypeIssues]
    return given.numel() >= MANY and any(dim != given.ndim - 1 and given.shape[dim] > 1 for dim in dims)


def size(node: Node) -> int:
    value = node.meta.get("val")
    return sum(bytes_of(each) for each in (value if isinstance(value, tuple | list) else [value]) if each is not None)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)
