"""Network namespaces, one a rank, joined by a bridge whose links are as slow as is asked for.

What a rank sends and what it gets is limited by a token bucket each, as at the port of a switch.
Needs root, `ip` and `tc` (iproute2), and a kernel with veth, bridge and tbf.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

from pdcompile.errors import ConfigError

INTERFACE = "eth0"  # of a rank, in its namespace
BURST, LATENCY = "128kb", "50ms"  # what a port lets through at once, and the longest it keeps


class Networks:
    """A network for so many ranks, for as long as the `with` block lasts; `rate` as tc writes it.

    Raises:
        ConfigError: this machine cannot make one, and why.
    """

    def __init__(self, ranks: int, rate: str) -> None:
        self._ranks, self._rate = ranks, rate
        self._name = f"pd{os.getpid() % 100_000}"  # interface names have 15 characters at most
        check()

    def place(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """Beginning of a rank's command, and its environment."""
        environment = {
            "MASTER_ADDR": self._address(0),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        return ["ip", "netns", "exec", f"{self._name}n{rank}"], environment

    def _address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def __enter__(self) -> Networks:
        bridge = f"{self._name}b"
        try:
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "link", "set", bridge, "up")
            for rank in range(self._ranks):
                self._join(rank, bridge)
        except BaseException:
            self._remove()
            raise
        return self

    def _join(self, rank: int, bridge: str) -> None:
        space, port = f"{self._name}n{rank}", f"{self._name}v{rank}"
        _run("ip", "netns", "add", space)
        inside = ("ip", "-n", space)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", space)
        _run("ip", "link", "set", port, "master", bridge, "up")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", INTERFACE, "up")
        _run(*inside, "addr", "add", f"{self._address(rank)}/24", "dev", INTERFACE)
        shaped = ("root", "tbf", "rate", self._rate, "burst", BURST, "latency", LATENCY)
        _run("tc", "-n", space, "qdisc", "add", "dev", INTERFACE, *shaped)
        _run("tc", "qdisc", "add", "dev", port, *shaped)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        """A link goes with its namespace, but only once nobody holds that: name both."""
        for rank in range(self._ranks):
            _try("ip", "link", "del", f"{self._name}v{rank}")
            _try("ip", "netns", "del", f"{self._name}n{rank}")
        _try("ip", "link", "del", f"{self._name}b")


def check() -> None:
    """Raise ConfigError where no network can be made, before anything is."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"shaped links need {' and '.join(missing)}, not found on this machine",
            where="--shape",
            remedy="install iproute2, or leave --shape out",
        )
    if os.geteuid() != 0:
        raise ConfigError(
            "shaped links need root, to make network namespaces",
            where="--shape",
            remedy="run as root, or leave --shape out",
        )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}",
            where="--shape",
            remedy="a kernel with network namespaces, veth, bridge and tbf, and the right to use "
            "them; or leave --shape out",
        )


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)  # it may never have been made
