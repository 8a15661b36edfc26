"""What `torch.compile` makes of a function, as a trace counts it.

PyTorch's ahead-of-time autograd traces both passes, decomposes them as the compiler does and decides with the
compiler's partitioner which tensors are kept for the backward pass. Matrix products, attention, convolutions and
similar operations are kernels of their own. Connected operations between two of those are one fused kernel: it reads
each input once and writes only the results that are read elsewhere. Sums over rows take one more kernel, which reads
its inputs again.

That takes seconds, so a function is traced once for all sizes of the batch. In that trace the first dimensions of its
tensors are prime numbers, larger than any factor of a model's dimensions: what they divide grows with the batch.
"""

import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

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
MANY = 4096  # elements: smaller sums over rows cost nothing extra
COLOURS = 3
SMALLEST_PRIME = 1009
MOMENTUM = re.compile("momentum=[^,)]*")  # of batch norms: micro-batches change it, which costs nothing

Sizes = dict[int, int]  # of a batch, by the prime that stood for it


def traced_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for `torch.compile`: calls of a function that differ in the size of the batch share one program."""
    return partial(_call, function)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    flat, trains = _Flat(function, args), torch.is_grad_enabled()
    casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    programs = PROGRAMS.setdefault((function, casts, Trace.current.capability, *flat.form), {})
    values, flat.values = flat.values, []  # the program keeps `flat`, which must not keep them allocated
    trained = tuple(value.requires_grad for value in values)
    if trained not in programs and (trains or not programs):
        programs[trained] = _compile(flat, values)
    results = programs[trained].train(*values) if trains else next(iter(programs.values())).embed(values)
    return results[0] if len(results) == 1 else results


class Program(NamedTuple):
    """A compiled function: with both passes, and without gradients."""

    train: Callable[..., Any]
    embed: Callable[[list[Any]], Any]


PROGRAMS: dict[Any, dict[tuple[bool, ...], Program]] = {}
"""By function and form of the arguments, then by what has gradients. Any of them computes without."""


class _Flat(nn.Module):
    """A call as a function of tensors alone: the weights of its modules, then its own tensors."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self.function = function
        leaves, self.spec = tree_flatten(args)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
        # In a list, so that they are no submodules: compiled code would bind their weights.
        self.holder = [nn.ModuleList(modules)]
        self.weights = dict(self.holder[0].named_parameters()) | dict(self.holder[0].named_buffers())
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in self.places]
        self.values = [*self.weights.values(), *tensors]
        self.primes = _primes([len(value) for value in tensors if _varies(value)])
        order = {size: -1 - number for number, size in enumerate(self.primes)}
        constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor | nn.Module)]
        self.form = (
            *(MOMENTUM.sub("", repr(module)) for module in modules), repr(constants), str(self.spec),
            *((tuple(value.shape), value.dtype) for value in self.weights.values()),
            *((_with_first(value, order), value.dtype) for value in tensors),
        )  # fmt: skip

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.leaves)
        for place, value in zip(self.places, values[len(self.weights) :], strict=True):
            leaves[place] = value
        (holder,) = self.holder
        holder.forward = lambda: self.function(*tree_unflatten(leaves, self.spec))
        output = torch.func.functional_call(holder, dict(zip(self.weights, values, strict=False)), ())
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        self.results = len(outputs)
        return outputs


def _varies(value: Tensor) -> bool:
    """Whether its first dimension is of the batch: not of a vector of weights, nor of the means of colours."""
    return value.ndim > value.is_floating_point() and len(value) > COLOURS


def _with_first(value: Tensor, replaced: Sizes) -> tuple[int, ...]:
    return (replaced[len(value)], *value.shape[1:]) if _varies(value) else tuple(value.shape)


def _primes(sizes: list[int]) -> Sizes:
    """Another one for each size, in the same proportions: they decide what is kept."""
    primes: Sizes = {}
    factor = -(-SMALLEST_PRIME // min(sizes, default=1))
    for size in sizes:
        above = (n for n in count(size * factor) if n not in primes.values())
        primes.setdefault(size, next(n for n in above if all(n % d for d in range(2, math.isqrt(n) + 1))))
    return primes


def _compile(flat: _Flat, values: list[Tensor]) -> Program:
    """Traced on tensors of its own, so that nothing is counted."""
    # The compiler takes a second to import.
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    module: Any = flat  # which need not be a graph
    primes, weights = tuple(flat.primes.values()), len(flat.weights)
    graphs: list[Graph] = []  # of the forward pass, then the backward pass
    saved_after: list[int] = []  # outputs of the forward pass

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        saved_after.append(num_fwd_outputs)
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def lower(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        graphs.append(gm.graph)
        run: Any = partial(Kernels(gm.graph, primes).run)
        run._boxed_call = True  # the list is emptied
        return run

    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    with _disable_current_modes(), saved_tensors_hooks(_unchanged, _unchanged), torch.enable_grad():
        with mode:
            examples = [
                _new(tuple(value.shape) if number < weights else _with_first(value, flat.primes), value)
                for number, value in enumerate(values)
            ]
        # Strides of gradients would bind them to the primes; code is not generated, since nothing executes it.
        with (
            config.patch(guess_tangent_strides_as_outputs=False),
            _use_lazy_graph_module(True),
            patch.object(GraphModule, "print_readable", lambda *_, **__: ""),  # for a log that is not written
        ):
            train = aot_module_simplified(module, examples, lower, lower, partition, select_decomp_table())
    outputs: Any = graphs[0].output_node().args[0]
    results = outputs[: saved_after[0] if saved_after else None][-flat.results :]  # after updated buffers
    return Program(train, Kernels(_only(graphs[0], results), primes).run)


def _only(graph: Graph, results: Sequence[Node]) -> Graph:
    """What computes these results."""
    copies: dict[Node, Node] = {}
    pruned = Graph()
    pruned.graph_copy(graph, copies)
    pruned.output([copies[node] for node in results])
    pruned.eliminate_dead_code()
    return pruned


def _unchanged(value: Tensor) -> Tensor:
    """Shields from the hooks of a block that is recomputed."""
    return value


class Kernels:
    """A graph as kernels in the order of the graph, with the tensors that each uses for the last time."""

    def __init__(self, graph: Graph, primes: tuple[int, ...]) -> None:
        self.primes = primes
        self.known: dict[tuple[Any, ...], Kernel | None] = {}
        self.inputs = graph.find_nodes(op="placeholder")
        self.outputs: Any = graph.output_node().args[0]
        nodes = [node for node in graph.nodes if node.op == "call_function" and not is_view(node)]
        groups = _groups(nodes)
        group_of = {node: number for number, group in enumerate(groups) for node in group}
        returned = {root(node) for node in self.outputs if isinstance(node, Node)}
        read = returned | {
            source
            for node in nodes
            for source in sources(node)
            if group_of.get(source) != group_of[node] and not (is_fused(node) and is_constant(source))
        }
        self.steps = [
            Fusion.of(group, read) if is_fused(group[0]) else group[0] for group in groups if read.intersection(group)
        ]
        last_use: dict[Node, int] = {}
        for number, step in enumerate(self.steps):
            used = [*step.reads, *step.writes] if isinstance(step, Fusion) else [step, *sources(step)]
            last_use |= dict.fromkeys(used, number)
        self.last_used: list[list[Node]] = [[] for _ in self.steps]
        for node, number in last_use.items():
            if node not in returned:
                self.last_used[number].append(node)

    def run(self, values: list[Any]) -> list[Any]:
        """Allocate as the kernels would, and count them. Empties `values`, so that the tensors can be freed."""
        held = Held(zip(self.inputs, values, strict=True))
        for node, value in held.items():
            for traced, size in zip(node.meta["val"].shape, value.shape, strict=True):
                held.sizes |= {prime: size * prime // traced for prime in self.primes if traced % prime == 0}
        values.clear()
        for step, dying in zip(self.steps, self.last_used, strict=True):
            if isinstance(step, Fusion):
                step.run(held, dying)
            else:
                held[step] = self._run_alone(step, held)
            for node in dying:
                held.pop(node, None)
        return [held.value(node) if isinstance(node, Node) else None for node in self.outputs]

    def _run_alone(self, step: Node, held: "Held") -> Any:
        """A kernel that is not fused, evaluated once for each size: there are as many calls as blocks."""
        trace, key = Trace.current, (step, *held.sizes.values())
        if key not in self.known:
            trace.launched = None
            result = held.evaluate(step)
            self.known[key] = trace.launched
            return result
        if kernel := self.known[key]:
            trace.launch(kernel._replace(phase=trace.phase))
        return tree_map_only(Tensor, held.new, step.meta["val"])


class Held(dict[Node, Any]):
    """Results that are in memory, and the sizes of this batch."""

    def __init__(self, inputs: Iterable[tuple[Node, Any]]) -> None:
        super().__init__(inputs)
        self.sizes: Sizes = {}

    def value(self, node: Node) -> Any:
        if node in self or not is_view(node):
            return self[node]
        owner = root(node)
        # Strides of inputs may differ from those of the trace, and a reshape may copy: those are evaluated.
        if owner.op == "placeholder" or _packet(node) is aten.reshape or not isinstance(self[owner], Tensor):
            return self.evaluate(node)
        like: Any = node.meta["val"]
        shape, stride = (tuple(map(self.scaled, numbers)) for numbers in (like.shape, like.stride()))
        return Trace.current.view(self[owner], shape, stride, self.scaled(like.storage_offset()))

    def evaluate(self, node: Node) -> Any:
        args, kwargs = tree_map(self._argument, (node.args, node.kwargs))
        target: Any = node.target
        return target(*args, **kwargs)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return self.value(leaf)
        return self.scaled(leaf) if type(leaf) is int else leaf

    def scaled(self, number: int) -> int:
        """A dimension, stride or number of bytes of the trace, for this batch."""
        for prime, size in self.sizes.items():
            if number % prime == 0 and number != sys.maxsize:
                number = number // prime * size
        return number

    def new(self, like: Tensor) -> Tensor:
        shape, stride = (tuple(map(self.scaled, numbers)) for numbers in (like.shape, like.stride()))
        return Trace.current.empty(shape, like.dtype, stride)


def _groups(nodes: list[Node]) -> list[list[Node]]:
    """Each kernel that is not fused alone; between two of those, connected operations together."""
    groups: list[list[Node]] = []
    open_groups: list[list[Node]] = []
    for node in nodes:
        if is_fused(node):
            inputs = {source for source in sources(node) if not is_constant(source)}
            joined = [group for group in open_groups if inputs.intersection(group)]
            open_groups = [group for group in open_groups if group not in joined]
            open_groups.append([*(member for group in joined for member in group), node])
        else:
            groups += [*open_groups, [node]]
            open_groups = []
    return groups + open_groups


class Fusion(NamedTuple):
    """One group of fused operations."""

    reads: list[Node]
    writes: list[Node]
    kernels: list[tuple[str, list[int]]]  # kind, bytes of each tensor

    @classmethod
    def of(cls, group: list[Node], read: set[Node]) -> "Fusion":
        writes = [node for node in group if node in read]
        sums = [node for node in group if over_rows(node)]

        def loaded(results: list[Node], in_memory: list[Node]) -> dict[Node, None]:
            """What a kernel reads for its results, as an ordered set."""
            loads: dict[Node, None] = {}
            waiting, visited = list(results), set(results)
            while waiting:
                for source in sources(waiting.pop()):
                    if source in visited or is_constant(source):
                        continue
                    visited.add(source)
                    if source not in group or source in in_memory:
                        loads[source] = None
                    else:
                        waiting.append(source)
            return loads

        kernels: list[tuple[str, list[int]]] = []
        reads: dict[Node, None] = {}
        mapped = [node for node in writes if node not in sums]
        for kind, results, in_memory in (("fused sums", sums, [*writes, *sums]), ("fused", mapped, sums)):
            if results:
                loads = loaded(results, in_memory)
                kernels.append((kind, [size for node in (*results, *loads) for size in sizes(node)]))
                reads |= loads
        return cls([node for node in reads if node not in group], writes, kernels)

    def run(self, held: Held, dying: list[Node]) -> None:
        spare = [node for node in dying if node in held and node in self.reads]
        for node in self.writes:
            reused = next((other for other in spare if sum(sizes(other)) == sum(sizes(node))), None)
            if reused is not None:  # written in the place of an input that is not used again
                spare.remove(reused)
                held.pop(reused)
            held[node] = tree_map(held.new, node.meta["val"])
        trace = Trace.current
        for kind, moved in self.kernels:
            trace.launch(Kernel(kind, trace.phase, 0, sum(map(held.scaled, moved)), 4))


def _new(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty_strided(shape, like.stride(), dtype=like.dtype).requires_grad_(like.requires_grad)


def sources(node: Node) -> list[Node]:
    return [root(source) for source in node.all_input_nodes]


def root(node: Node) -> Node:
    """The node that owns the memory."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: Node) -> bool:
    target: Any = node.target
    if node.op != "call_function":
        return False
    return target is operator.getitem or getattr(target, "is_view", False) or _packet(node) in VIEWS


def is_fused(node: Node) -> bool:
    if node.op != "call_function" or is_view(node):
        return False
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _packet(node) in FUSED


def is_constant(node: Node) -> bool:
    """Computed again where it is used, never read from memory."""
    return is_fused(node) and not node.all_input_nodes


def over_rows(node: Node) -> bool:
    """Whether it sums many elements that are not adjacent in memory."""
    if _packet(node) not in SUMS:
        return False
    summed: Any = node.all_input_nodes[0].meta["val"]
    dims: Any = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else range(summed.ndim)
    outer = {dim % summed.ndim for dim in dims} - {summed.ndim - 1}
    return summed.numel() >= MANY and any(summed.shape[dim] > 1 for dim in outer)


def sizes(node: Node) -> list[int]:
    """Bytes of its results."""
    value = node.meta.get("val")
    return [bytes_of(part) for part in (value if isinstance(value, tuple | list) else [value]) if part is not None]


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)
