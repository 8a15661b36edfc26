"""Barriers in the kernels that torch.compile makes.

Where a reduction takes several loops, Inductor stores a value in one and loads it again in a later one, and nothing
makes a warp wait for what another one stores (pytorch issue 190517). Whether that goes wrong depends on the block
sizes that autotuning picks: gradients are then off by orders of magnitude in some calls and right in others. A
barrier behind such a store mends it. Only stores through plain pointers, in one line, are looked at: Inductor's are.
"""

import functools
import re
from typing import Any

STORE = re.compile(r"^(\s*)tl\.store\((\w+) \+")
LOADED = re.compile(r"tl\.load\((\w+) \+")
BARRIER = "tl.debug_barrier()"


def with_barriers(source: str) -> str:
    """A kernel's source with a barrier behind each store that it loads from again."""
    loaded_later: set[str] = set()
    found: list[str] = []  # from the last line to the first
    for line in reversed(source.split("\n")):
        store = STORE.match(line)
        whole = line.count("(") == line.count(")")
        if store and whole and store[2] in loaded_later and not (found and BARRIER in found[-1]):
            found.append(store[1] + BARRIER)
        found.append(line)
        loaded_later |= set(LOADED.findall(line))
    return "\n".join(reversed(found))


@functools.cache
def mend_compiled_kernels() -> None:
    """From now on torch.compile's kernels have these barriers."""
    from torch._inductor import async_compile  # the compiler takes a second to import

    compiler: Any = async_compile.AsyncCompile
    compile_kernel = compiler.triton

    @functools.wraps(compile_kernel)
    def mended(self: Any, kernel_name: str, source_code: str, *rest: Any, **named: Any) -> Any:
        return compile_kernel(self, kernel_name, with_barriers(source_code), *rest, **named)

    compiler.triton = mended
