"""Barriers in the kernels that torch.compile generates: a workaround for pytorch issue 190517.

A reduction in several loops stores a value in one loop and loads it in a later one, and Inductor does not make a warp
wait for the stores of another. Whether the race shows depends on the block sizes that autotuning picks: gradients are
then wrong by orders of magnitude in some calls and right in others. A barrier after each such store fixes it. Only
one-line stores through plain pointers are handled, the form that Inductor generates.
"""

import functools
import re
from typing import Any

STORE = re.compile(r"^(\s*)tl\.store\((\w+) \+")
LOAD = re.compile(r"tl\.load\((\w+) \+")
BARRIER = "tl.debug_barrier()"


def with_barriers(source: str) -> str:
    """A kernel's source with a barrier after each store to a pointer that is loaded later."""
    loaded_later: set[str] = set()
    reversed_lines: list[str] = []
    for line in reversed(source.split("\n")):
        store = STORE.match(line)
        complete = line.count("(") == line.count(")")
        present = bool(reversed_lines) and BARRIER in reversed_lines[-1]
        if store and complete and store[2] in loaded_later and not present:
            reversed_lines.append(store[1] + BARRIER)
        reversed_lines.append(line)
        loaded_later |= set(LOAD.findall(line))
    return "\n".join(reversed(reversed_lines))


@functools.cache
def add_kernel_barriers() -> None:
    """Make torch.compile add these barriers, in this process, from now on."""
    from torch._inductor import async_compile  # the compiler takes a second to import

    compiler: Any = async_compile.AsyncCompile
    compile_kernel = compiler.triton

    @functools.wraps(compile_kernel)
    def with_barriers_added(self: Any, kernel_name: str, source_code: str, *rest: Any, **named: Any) -> Any:
        return compile_kernel(self, kernel_name, with_barriers(source_code), *rest, **named)

    compiler.triton = with_barriers_added
