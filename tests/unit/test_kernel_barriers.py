"""Barriers in compiled kernels (kernel_barriers.py)."""

import subprocess
import sys

import pytest

from leanclip.models.kernel_barriers import with_barriers

KERNEL = """
def kernel(in_ptr0, out_ptr0, out_ptr1, xnumel, r0_numel):
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_2 + 256*x3), r0_mask & xmask, other=0.0)
        tl.store(out_ptr0 + (r0_2 + 256*x3), tmp0, r0_mask & xmask){first}
        tl.store(out_ptr1 + (r0_2 + 256*x3), tmp0, r0_mask & xmask)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp1 = tl.load(out_ptr0 + (r0_2 + 256*x3), r0_mask & xmask, other=0.0)
        tl.store(out_ptr0 + (r0_2 + 256*x3), tmp1, r0_mask & xmask)
"""
BARRIER = "\n        tl.debug_barrier()"


def test_a_barrier_follows_a_store_that_is_loaded_later():
    """And no other store; an existing barrier is not repeated."""
    fixed = KERNEL.format(first=BARRIER)
    assert with_barriers(KERNEL.format(first="")) == fixed
    assert with_barriers(fixed) == fixed


def test_a_store_over_several_lines_is_left_alone():
    source = "tl.store(p + x,\n    value)\ntl.load(p + x)"
    assert with_barriers(source) == source


CODE = """
import sys
from torch._inductor.async_compile import AsyncCompile
from leanclip.models import ModelConfig, create_model
from leanclip.models.transformer_towers import compiled
seen = []
AsyncCompile.triton = lambda self, name, source, device_str="cuda": seen.append((name, source, device_str))
if sys.argv[1] == "a block":
    compiled(abs)
    compiled(min)
else:
    create_model(ModelConfig(model="RN50"), shapes_only=True).compile_towers()
source = "tl.store(out_ptr0 + (x), tmp0)\\ntl.load(out_ptr0 + (x))"
AsyncCompile().triton("kernel", source, device_str="cuda:1")
assert seen == [("kernel", source.replace("\\n", "\\ntl.debug_barrier()\\n"), "cuda:1")], seen
"""


@pytest.mark.parametrize("what", ["a block", "a tower"])
def test_compiled_kernels_get_barriers(what):
    done = subprocess.run([sys.executable, "-c", CODE, what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
