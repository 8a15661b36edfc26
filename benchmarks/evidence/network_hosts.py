"""Hosts as network namespaces of this machine (Linux, as root, with iproute2), each with a wire to one switch."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "leanclip-"
WIRE = "wire"  # the interface's name inside every host


class NoHostsError(Exception):
    """Namespaces cannot be made here."""


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str
    switch: str  # the namespace of the switch
    port: str  # of the switch

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs it on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def cut(self) -> None:
        """Pull the cable: packets of both directions are lost, and no connection is told so."""
        run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def connect(self) -> None:
        run("ip", "-n", self.switch, "link", "set", self.port, "up")

    def shape(self, megabits: float) -> None:
        """Limit the wire in each direction."""
        for namespace, interface in ((self.namespace, WIRE), (self.switch, self.port)):
            rate = ["rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms"]
            run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", *rate)

    def power_off(self) -> None:
        """SIGKILL for every process of the host."""
        _kill_processes(self.namespace)


@contextlib.contextmanager
def connected_hosts(count: int) -> Iterator[list[Host]]:
    """Hosts 10.77.0.1 and following. At the end their processes are killed and the namespaces removed."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        raise NoHostsError("needs Linux and iproute2")
    _remove_abandoned()
    switch = f"{PREFIX}{os.getpid()}-switch"
    hosts = [Host(f"{PREFIX}{os.getpid()}-{n}", f"10.77.0.{n}", switch, f"port{n}") for n in range(1, count + 1)]
    try:
        try:
            for namespace in (switch, *(host.namespace for host in hosts)):
                run("ip", "netns", "add", namespace)
            run("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
            for host in hosts:
                _connect(host)
        except subprocess.CalledProcessError as error:
            raise NoHostsError(f"may not make network namespaces: {error.stderr.strip()}") from error
        yield hosts
    finally:
        for namespace in (switch, *(host.namespace for host in hosts)):
            _remove(namespace)


def _connect(host: Host) -> None:
    inside, switch = ["ip", "-n", host.namespace], ["ip", "-n", host.switch]
    run(*switch, "link", "add", host.port, "type", "veth", "peer", WIRE, "netns", host.namespace)
    run(*switch, "link", "set", host.port, "up", "master", "bridge")
    run(*inside, "addr", "add", f"{host.address}/24", "dev", WIRE)
    for interface in (WIRE, "lo"):
        run(*inside, "link", "set", interface, "up")


def _remove_abandoned() -> None:
    """Namespaces of a process that was killed."""
    for line in run("ip", "netns", "list").splitlines():
        namespace = line.partition(" ")[0]
        owner = namespace.removeprefix(PREFIX).partition("-")[0]
        if namespace.startswith(PREFIX) and owner.isdecimal() and not Path("/proc", owner).exists():
            _remove(namespace)


def _remove(namespace: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
        _kill_processes(namespace)
        run("ip", "netns", "delete", namespace)


def _kill_processes(namespace: str) -> None:
    for pid in run("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def output_of_first(commands: Sequence[Sequence[str]], variables: Sequence[dict[str, str]], seconds: float) -> str:
    """Run the processes of a group together."""
    processes = [
        subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes := [process.returncode for process in processes]):
        raise RuntimeError(f"processes ended with {codes}")
    return outputs[0]
