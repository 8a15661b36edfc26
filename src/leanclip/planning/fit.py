"""How many samples a GPU can embed at a time: what the planner's trace of a step says to the free memory."""

import torch

from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.planning.micro_batch_search import USED, Search
from leanclip.planning.step_trace import UNTRACED
from leanclip.runs.config import TrainConfig


def fitting(config: TrainConfig, *, samples: int, ranks: Ranks, device: torch.device) -> int:
    """The largest micro-batch that fits on every rank's GPU, at most the share of a rank.

    Called with model and loss on the device, which the trace counts too. Captions are taken to be as long as they
    can be, and the pixels of the next batch to be there already. A model that cannot be traced takes its whole share.
    """
    batch = config.data.global_batch_size
    assert batch is not None
    share = ranks.largest_share(batch)
    if device.type != "cuda":
        return share
    reserved = torch.cuda.memory_reserved(device)  # first: what another thread takes in between counts as taken
    free, _ = torch.cuda.mem_get_info(device)
    room = int(USED * (free + reserved))
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    search = Search(config, samples, ranks.size, capability, properties.multi_processor_count)
    try:
        micro = search.largest(room)
    except UNTRACED:
        micro = share
    micro = min(ranks.all_gather_objects(micro))
    if micro < 1:
        raise UserError(
            f"not one sample fits: {room / 2**30:.1f} GiB are free beside other programs, see leanclip plan;"
            " take a smaller model or batch, or give --micro-batch"
        )
    return micro
