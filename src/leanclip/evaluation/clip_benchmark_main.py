"""CLIP_benchmark's own command line, started as `python -m leanclip.evaluation.clip_benchmark_main eval ...`.

The only module that imports clip_benchmark. One function of its version 1.6.2 is replaced: its `accuracy` converts an
array of one element to a float, which NumPy 2.4 and later refuse. webdataset's decoders that could run code are
removed, in this process and, because this is done at import, in its worker processes.
"""

from collections.abc import Sequence

from clip_benchmark import cli
from clip_benchmark.metrics import zeroshot_classification
from torch import Tensor
from webdataset import autodecode

PLAIN = ("txt", "text", "transcript", "cls", "cls2", "index", "inx", "id", "json", "jsn", "npy")

for _ending in set(autodecode.decoders) - set(PLAIN):  # pickles among them
    del autodecode.decoders[_ending]


def accuracy(output: Tensor, target: Tensor, topk: Sequence[int] = (1,)) -> list[float]:
    """The share of rows whose target is among the k highest, for each k."""
    highest = output.topk(max(topk), dim=1).indices
    return [(highest[:, :k] == target[:, None]).any(1).double().mean().item() for k in topk]


if __name__ == "__main__":
    zeroshot_classification.accuracy = accuracy
    cli.main()
