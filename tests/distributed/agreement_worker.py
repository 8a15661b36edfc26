"""One rank of the agreement tests: sets up a run that differs from that of the other rank."""

from pathlib import Path

from shard_files import sound, write_shard

from leanclip.config import override
from leanclip.errors import UserError
from leanclip.runs import TrainConfig
from leanclip.training import resolve


def disagree(ranks, folder, what):
    """Each host has a copy of the data, which is allowed unless it differs."""
    copy = Path(folder) / f"host-{ranks.rank}"
    copy.mkdir()
    for number, name in enumerate("ab"):
        write_shard(copy / f"{name}.tar", sound(4 + number, start=10 * number))
    names = "b,a" if what == "order" and ranks.rank == 1 else "a,b"
    values = {"train_data": f"{copy}/{{{names}}}.tar", "global_batch_size": 4, "warmup": 0}
    if what == "rate" and ranks.rank == 1:
        values["lr"] = 0.5
    try:
        resolve(override(TrainConfig(), values, "test"))
    except UserError as error:
        return {"error": str(error)}
    return {"error": ""}
