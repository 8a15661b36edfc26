"""The processes that share a global batch."""

from leanclip.distributed.launch import Launch, device_for, joined, launched
from leanclip.distributed.ledger import LEDGER, Ledger, Traffic, traffic
from leanclip.distributed.parallel import reducing, replicated, sharded, split_like, whole
from leanclip.distributed.ranks import Ranks, Rows
from leanclip.distributed.watch import LOST, PROGRESS, Watch

__all__ = [
    "LEDGER",
    "LOST",
    "PROGRESS",
    "Launch",
    "Ledger",
    "Ranks",
    "Rows",
    "Traffic",
    "Watch",
    "device_for",
    "joined",
    "launched",
    "reducing",
    "replicated",
    "sharded",
    "split_like",
    "traffic",
    "whole",
]
