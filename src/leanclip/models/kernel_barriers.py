"""Barriers in the kernels that torch.compile generates: a workaround for pytorch issue 190517.

A reduction in several loops stores a value in one loop and loads it in a later one, and Inductor does not make a warp
wait for the stores of another. Whether the race shows depends on the block sizes that autotuning picks: gradients are
then wrong by orders of magnitude in some calls and right in others. A barrier after each such store fixes it. Only
one-line stores through plain pointers are handled, the form that Inductor generates.
"""

import functools
import re
from typing import Any

STORE = re.compile(r"^( *)tl\.store\((\w+) \+.*$", re.MULTILINE)
BARRIER = "tl.debug_barrier()"


def with_barriers(source: str) -> str:
    """A kernel's source with a barrier after each store to a pointer that is loaded later."""

    def with_barrier(store: re.Match[str]) -> str:
        line, rest = store[0], source[store.end() :]
        complete, present = line.count("(") == line.count(")"), rest.lstrip().startswith(BARRIER)
        needed = complete and f"tl.load({store[2]} +" in rest and not present
        return f"{line}\n{store[1]}{BARRIER}" if needed else line

    return STORE.sub(with_barrier, source)


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
