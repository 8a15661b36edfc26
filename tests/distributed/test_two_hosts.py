"""Two hosts, as network namespaces of this machine, train together through torchrun's rendezvous."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOSTS = ("leanclip-host-a", "leanclip-host-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
WIRES = ("leanclip-a", "leanclip-b")


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def remove_hosts():
    for host in HOSTS:
        ip("netns", "delete", host)


@pytest.fixture
def two_hosts():
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and iproute2")
    remove_hosts()
    made = [ip("netns", "add", host) for host in HOSTS]
    made.append(ip("link", "add", WIRES[0], "netns", HOSTS[0], "type", "veth", "peer", WIRES[1], "netns", HOSTS[1]))
    if any(result.returncode for result in made):
        remove_hosts()
        pytest.skip(f"may not make network namespaces: {made[-1].stderr.strip() or made[0].stderr.strip()}")
    for host, address, wire in zip(HOSTS, ADDRESSES, WIRES, strict=True):
        for arguments in (
            ("addr", "add", f"{address}/24", "dev", wire), ("link", "set", wire, "up"), ("link", "set", "lo", "up"),
        ):  # fmt: skip
            assert ip("-n", host, *arguments).returncode == 0
    yield
    remove_hosts()


def test_two_hosts_train_together(two_hosts, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    command = (
        "leanclip train --max-steps 4 --global-batch-size 50 --loss fastclip-v2 --eval-every 0 --log-every 1".split()
    )
    command += f"--device cpu --workers 0 --name two --logs {tmp_path} --dist-timeout 60".split()
    hosts = []
    for number, (host, address, wire) in enumerate(zip(HOSTS, ADDRESSES, WIRES, strict=True)):
        rendezvous = f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {ADDRESSES[0]}:29400"
        rendezvous += f" --local-addr {address} --rdzv-conf is_host={int(number == 0)} -m --"
        hosts.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *torchrun, *rendezvous.split(), *command],
                env=os.environ | {"GLOO_SOCKET_IFNAME": wire, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        for host in hosts:
            output, _ = host.communicate(timeout=200)
            assert host.returncode == 0, output[-3000:]
    finally:
        for host in hosts:
            host.kill()
    lines = [json.loads(line) for line in (Path(tmp_path) / "two" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 4
    assert json.loads((Path(tmp_path) / "two" / "run.json").read_text())["processes"] == 2
    assert losses[-1] < losses[0]
