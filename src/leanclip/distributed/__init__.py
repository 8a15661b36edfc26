"""The processes that share a global batch."""

from leanclip.distributed.launch import Launch, device_for, joined, launch_id, launched, restarted, start_time
from leanclip.distributed.ledger import LEDGER, Ledger, Traffic, traffic
from leanclip.distributed.parallel import forget_gathered, reducing, replicated, sharded, split_like, whole
from leanclip.distributed.ranks import Ranks, Rows, host_group
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
    "forget_gathered",
    "host_group",
    "joined",
    "launch_id",
    "launched",
    "reducing",
    "replicated",
    "restarted",
    "sharded",
    "split_like",
    "start_time",
    "traffic",
    "whole",
]
