"""A run of two hosts, network namespaces of this machine, that loses one and takes it back."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kill_job import Settings, compare, finish, result
from network_hosts import WIRE

SETTINGS = Settings(
    steps=198, epochs=18, save_every=10, loss="fastclip-v3", precision="fp64", timeout=8.0, more=("--keep-last", "2")
)
LAST_CALL = 5  # seconds for which torchrun waits for more hosts
EXPIRY = 15  # seconds after which torchrun counts a silent host out
SLACK = 60.0  # seconds in which a busy machine starts torchrun and its process


class Cluster:
    """The hosts, the first of which has torchrun's rendezvous, and the run that they share."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.run, self.began = hosts, folder, folder / "logs" / "run", time.monotonic()
        self.agents = {}

    def start(self, number):
        host = self.hosts[number]
        torchrun = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 5 --local-addr {host.address} --rdzv-backend c10d"
        torchrun += f" --rdzv-endpoint {self.hosts[0].address}:29400 --rdzv-id elastic"
        torchrun += f" --rdzv-conf is_host={int(number == 0)},last_call_timeout={LAST_CALL} --"
        script = [str(Path(__file__).with_name("slow_alone.py"))]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), *script]
        environment = {"GLOO_SOCKET_IFNAME": WIRE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"host-{number}").open("ab") as output:
            self.agents[number] = subprocess.Popen(
                host.command([*command, *SETTINGS.arguments(self.folder, self.folder / "logs")]),
                env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def step(self):
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    @property
    def processes(self):
        with contextlib.suppress(FileNotFoundError, ValueError):
            return json.loads((self.run / "run.json").read_text()).get("processes")
        return None

    def until(self, condition, seconds, event):
        deadline = time.monotonic() + seconds
        while not condition():
            codes = {number: agent.poll() for number, agent in self.agents.items()}
            assert time.monotonic() < deadline and not any(codes.values()), (event, codes, self.printed())
            time.sleep(0.1)
        self.note(event)

    def note(self, event):
        """The log of the run."""
        seconds = time.monotonic() - self.began
        print(f"{seconds:6.1f} s  {event}: step {self.step} of {SETTINGS.steps} on {self.processes} processes")

    def printed(self):
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("host-?")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_host_is_replaced_by_none_and_returns(two_hosts, tmp_path):
    """`pytest -s -m slow` prints the log."""
    cluster = Cluster(two_hosts, tmp_path)
    for number in (0, 1):
        cluster.start(number)
    cluster.until(lambda: cluster.step >= 30, 2 * SLACK, "both hosts train")

    two_hosts[1].cut()
    cluster.note("the network of the second is cut")
    two_hosts[1].power_off()
    cluster.agents.pop(1).wait()
    limit = SETTINGS.timeout + EXPIRY + LAST_CALL + SLACK
    cluster.until(lambda: cluster.processes == 1, limit, "the first continues alone")
    resumed = cluster.step
    cluster.until(lambda: cluster.step >= resumed + 5, SLACK, "five steps later")

    two_hosts[1].connect()
    cluster.start(1)
    cluster.until(lambda: cluster.processes == 2, 2 * SLACK, "the second has returned")
    assert cluster.step < SETTINGS.steps - 20
    cluster.until(lambda: all(agent.poll() == 0 for agent in cluster.agents.values()), 2 * SLACK, "finished")
    found = result(tmp_path / "logs", SETTINGS.steps)
    expected = finish(SETTINGS, 2, tmp_path, tmp_path / "uninterrupted")
    compare(found, expected, exact=False)
    losses, expected_losses = ([line["loss"] for line in run.metrics if "loss" in line] for run in (found, expected))
    assert len(losses) == SETTINGS.steps
    assert losses == pytest.approx(expected_losses, rel=1e-8)
    largest = max(abs(a / b - 1) for a, b in zip(losses, expected_losses, strict=True))
    print(f"{len(losses)} losses: largest relative difference to the uninterrupted run {largest:.1e}")
