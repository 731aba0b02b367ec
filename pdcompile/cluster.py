"""Cluster: the machines that a plan is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One worker. `speed` is relative to the reference device; `memory_bytes` None: no limit."""

    kind: str = "cpu"
    memory_bytes: int | None = None
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Level:
    """One level of links, innermost first: `size` children joined by equal links.

    `bytes_per_second` is per device and direction.
    """

    name: str
    size: int
    bytes_per_second: float
    latency_seconds: float = 0.0
    full_duplex: bool = True


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices in rank order, and the levels that join them (their sizes multiply to the count).

    `in_process` marks `Cluster.local(n)`: all stages run in one process.
    """

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    in_process: bool = False

    @staticmethod
    def local(n: int, *, memory: int | str | None = None) -> Cluster:
        """n stages in this process: no links to speak of, CPU, optional memory limit each."""
        raise NotImplementedError

    @staticmethod
    def parse(text: str) -> Cluster:
        """``2x4`` (hosts x devices) or ``4``."""
        raise NotImplementedError

    @staticmethod
    def load(path: str) -> Cluster:
        """Read cluster.toml."""
        raise NotImplementedError

    def level_between(self, a: int, b: int) -> Level:
        """The slowest level that joins devices a and b."""
        raise NotImplementedError
