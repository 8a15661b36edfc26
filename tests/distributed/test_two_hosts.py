"""Two hosts, as network namespaces of this machine, train together through torchrun's rendezvous."""

import json
import os
import subprocess
import sys
from pathlib import Path

from network_hosts import WIRE

from run_records import records


def test_two_hosts_train_together(two_hosts, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    command = (
        "leanclip train --max-steps 4 --global-batch-size 50 --loss fastclip-v2 --eval-every 0 --log-every 1".split()
    )
    command += f"--device cpu --workers 0 --name two --logs {tmp_path} --dist-timeout 60".split()
    agents = []
    for number, host in enumerate(two_hosts):
        rendezvous = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {two_hosts[0].address}:29400"
        rendezvous += f" --local-addr {host.address} --rdzv-conf is_host={int(number == 0)} -m --"
        agents.append(
            subprocess.Popen(
                host.command([*torchrun, *rendezvous.split(), *command]),
                env=os.environ | {"GLOO_SOCKET_IFNAME": WIRE, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    for agent in agents:
        output, _ = agent.communicate(timeout=200)
        assert agent.returncode == 0, output[-3000:]
    losses = [line["loss"] for line in records(Path(tmp_path) / "two", "train")]
    assert len(losses) == 4
    assert json.loads((Path(tmp_path) / "two" / "run.json").read_text())["processes"] == 2
    assert losses[-1] < losses[0]
