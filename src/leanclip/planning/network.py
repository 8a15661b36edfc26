"""How long collectives take: rings over links of a bandwidth and a latency.

On a ring of N ranks a gathered vector of S bytes costs each rank S (N-1)/N bytes in N-1 hops, a summed one twice
both. GPUs of one host speak over its own links. Where the ring leaves the host, it passes the host's network cards
once, so its pace is the slower of the two: the GPUs of a host share the cards, but the ring needs them once for all.
"""

from dataclasses import dataclass

EFFICIENCY = 0.8  # of the nominal bandwidth, as collectives usually reach


@dataclass(frozen=True)
class Network:
    """Links between GPUs: nominal bytes/s in one direction and seconds per hop."""

    name: str
    inside: float  # bytes/s between GPUs of a host
    between: float  # bytes/s of all network cards of a host
    hop_inside: float
    hop_between: float
    per_host: int = 8  # GPUs

    def gather(self, size: float, ranks: int) -> float:
        """Seconds until every rank has a vector of `size` bytes, of which each brought its part."""
        if ranks == 1:
            return 0.0
        outside = ranks > self.per_host
        pace = EFFICIENCY * (min(self.inside, self.between) if outside else self.inside)
        crossings = -(-ranks // self.per_host) if outside else 0
        hops = (ranks - 1 - crossings) * self.hop_inside + crossings * self.hop_between
        return size * (ranks - 1) / ranks / pace + hops

    def sum(self, size: float, ranks: int) -> float:
        """Seconds until every rank has the sum of all ranks' vectors of `size` bytes."""
        return 2 * self.gather(size, ranks)


# inside: NVLink of the A100 and later, 300 GB/s each way; without it PCIe 4, 25 GB/s.
NETWORKS = {
    "nvlink": Network("nvlink", 300e9, 300e9, 3e-6, 3e-6, per_host=1 << 20),
    "infiniband": Network("infiniband", 300e9, 8 * 25e9, 3e-6, 8e-6),  # one 200 Gb/s card per GPU
    "infiniband-1": Network("infiniband-1", 300e9, 25e9, 3e-6, 8e-6),  # one 200 Gb/s card per host
    "25gbe": Network("25gbe", 300e9, 3.125e9, 3e-6, 30e-6),
    "pcie": Network("pcie", 25e9, 25e9, 8e-6, 30e-6),
}
