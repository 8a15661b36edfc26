"""The processes that share a global batch."""

from leanclip.distributed.ranks import Ranks

__all__ = ["Ranks"]
