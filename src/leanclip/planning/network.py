"""How long collectives take: rings over links of a bandwidth and a latency.

On a ring of N ranks a gathered vector of S bytes costs each rank S (N-1)/N bytes in N-1 hops, a summed one twice as
much. GPUs of one host use its own links. A ring over several hosts passes the network adapters of each host once, so
its rate is that of the slower link; the GPUs of a host share the adapters.
"""

from dataclasses import dataclass

EFFICIENCY = 0.8  # of the nominal bandwidth, as collectives usually reach


@dataclass(frozen=True)
class Network:
    """Links between GPUs: nominal bytes/s in one direction and seconds per hop."""

    name: str
    inside: float  # bytes/s between GPUs of a host
    between: float  # bytes/s of all network adapters of a host
    hop_inside: float
    hop_between: float
    per_host: int = 8  # GPUs

    def gather(self, size: float, ranks: int) -> float:
        """Seconds until every rank has a vector of `size` bytes, of which every rank holds a part."""
        if ranks == 1:
            return 0.0
        outside = ranks > self.per_host
        rate = EFFICIENCY * (min(self.inside, self.between) if outside else self.inside)
        crossings = -(-ranks // self.per_host) if outside else 0
        hops = (ranks - 1 - crossings) * self.hop_inside + crossings * self.hop_between
        return size * (ranks - 1) / ranks / rate + hops

    def sum(self, size: float, ranks: int) -> float:
        """Seconds until every rank has the sum of all ranks' vectors of `size` bytes."""
        return 2 * self.gather(size, ranks)


# inside: NVLink of the A100 and later, 300 GB/s each way; without it PCIe 4, 25 GB/s.
NETWORKS = {
    "nvlink": Network("nvlink", 300e9, 300e9, 3e-6, 3e-6, per_host=1 << 20),
    "infiniband": Network("infiniband", 300e9, 8 * 25e9, 3e-6, 8e-6),  # one 200 Gb/s adapter per GPU
    "infiniband-1": Network("infiniband-1", 300e9, 25e9, 3e-6, 8e-6),  # one 200 Gb/s adapter per host
    "25gbe": Network("25gbe", 300e9, 3.125e9, 3e-6, 30e-6),
    "pcie": Network("pcie", 25e9, 25e9, 8e-6, 30e-6),
}
