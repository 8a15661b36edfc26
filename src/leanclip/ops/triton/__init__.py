"""Fused similarity and epilogue for CUDA: a tile of similarities never travels to memory, its weights once."""

from leanclip.ops.triton import scalars
from leanclip.ops.triton.launch import gradients, pairwise, statistics

__all__ = ["gradients", "pairwise", "scalars", "statistics"]
