"""The processes that share a global batch."""

from leanclip.distributed.ddp_fsdp import forget_gathered, reducing, replicated, sharded, split_like, whole
from leanclip.distributed.heartbeat import LOST, PROGRESS, Watch
from leanclip.distributed.launch import Launch, device_for, joined, launch_id, launched, restarted, start_time
from leanclip.distributed.ranks import Ranks, Rows, host_group
from leanclip.distributed.traffic import LEDGER, Ledger, Traffic, traffic

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
