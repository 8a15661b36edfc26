"""The processes that share a global batch."""

from leanclip.distributed.ddp_fsdp import (
    full_tensor,
    gradient_sync,
    local_tensor,
    reshard,
    shard_like,
    wrap_ddp,
    wrap_fsdp,
)
from leanclip.distributed.heartbeat import LOST_RANK_EXIT, Heartbeat
from leanclip.distributed.launch import (
    Launch,
    detect_launch,
    device_for,
    launch_id,
    process_group,
    start_time,
)
from leanclip.distributed.ranks import (
    TRAFFIC_COUNTER,
    PendingGather,
    Ranks,
    Traffic,
    TrafficCounter,
    compare_traffic,
    gloo_group,
)

__all__ = [
    "LOST_RANK_EXIT",
    "TRAFFIC_COUNTER",
    "Heartbeat",
    "Launch",
    "PendingGather",
    "Ranks",
    "Traffic",
    "TrafficCounter",
    "compare_traffic",
    "detect_launch",
    "device_for",
    "full_tensor",
    "gloo_group",
    "gradient_sync",
    "launch_id",
    "local_tensor",
    "process_group",
    "reshard",
    "shard_like",
    "start_time",
    "wrap_ddp",
    "wrap_fsdp",
]
