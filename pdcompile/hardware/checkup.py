"""Checkup: what is here, and what of it stands in the way of a pipeline.  Takes a second or two."""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import pdcompile
from pdcompile.errors import PdcompileError
from pdcompile.hardware import devices, host
from pdcompile.plan import Plan
from pdcompile.plan.host_requirements import lacks
from pdcompile.releases.packages import in_range
from pdcompile.units import format_bytes

LITTLE_MEMORY = 10**9  # bytes that are free
LITTLE_DISK = 10**9
SHOWN = ("torch", "numpy", "ortools", "sympy", "safetensors", "transformers", "timm")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at; `remedy` says what to do where it is not ok."""

    about: Literal["versions", "processes", "memory", "disk", "network", "devices", "plan"]
    state: Literal["ok", "look", "wrong"]
    text: str
    remedy: str = ""


def checkup(
    plan: Path | None = None,
    processes: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Line]:
    """Everything that can be said without running anything.

    Args:
        plan: a plan file, to be held against what is here.
        processes: that it is to run on; None: WORLD_SIZE, or one process.
    """
    return [
        *_versions(),
        *_processes(environ),
        *_memory(),
        *_disk(environ),
        *_network(environ),
        *_devices(environ),
        *(_plan(plan, processes, environ) if plan is not None else ()),
    ]


def _requirements() -> list[str] | None:
    """Requirements of pdcompile; None where it is not installed."""
    try:
        return requires("pdcompile") or []
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Line]:
    wanted, needs = {}, _requirements()
    if needs is None:
        yield Line(
            "versions", "look", "pdcompile runs from a folder that is not installed, so that "
            "versions cannot be held against those that it wants", "pip install -e . in it",
        )  # fmt: skip
    for text in needs or ():
        if match := re.fullmatch(r"([A-Za-z0-9_.-]+)([<>=!~0-9.,]*)", text.replace(" ", "")):
            wanted[match[1]] = match[2]  # what only an extra wants has a marker behind it
    yield Line("versions", "ok", f"pdcompile {pdcompile.__version__}")
    yield Line("versions", "ok", f"Python {platform.python_version()}, {platform.platform()}")
    for name in dict.fromkeys((*SHOWN, *wanted)):
        try:
            has = version(name)
        except PackageNotFoundError:
            if name in wanted:
                yield Line(
                    "versions", "wrong", f"{name} is not installed",
                    f"pip install '{name}{wanted[name]}'",
                )  # fmt: skip
            continue
        if not in_range(has, wanted.get(name, "")):
            yield Line(
                "versions", "wrong", f"{name} {has} is not {wanted[name]}",
                f"pip install '{name}{wanted[name]}'",
            )  # fmt: skip
        elif name in SHOWN:
            yield Line("versions", "ok", f"{name} {has}")


def _processes(environ: Mapping[str, str]) -> Iterator[Line]:
    world, local = _count(environ, "WORLD_SIZE"), _count(environ, "LOCAL_WORLD_SIZE")
    cores = host.cores()
    if world is None:
        yield Line("processes", "ok", f"one process, {cores} cores")
    else:
        here = "" if local in (None, world) else f", {local} of them on this host"
        yield Line("processes", "ok", f"{world} processes{here}, {cores} cores here")
    text = environ.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdecimal() else None
    if threads is None:
        yield Line(
            "processes", "look",
            "OMP_NUM_THREADS is not set: torchrun sets it to 1, and times are measured with as "
            "many threads as a run has",
            "OMP_NUM_THREADS=1, or cores divided by processes of a host",
        )  # fmt: skip
    elif threads * (local or 1) > cores:
        yield Line(
            "processes", "look",
            f"{local or 1} processes of {threads} threads share {cores} cores: a step takes longer "
            "than forecast",
            f"OMP_NUM_THREADS={max(1, cores // (local or 1))}, or fewer processes a host",
        )  # fmt: skip
    else:
        yield Line("processes", "ok", f"OMP_NUM_THREADS={threads}")


def _memory() -> Iterator[Line]:
    whole, free = host.memory_bytes(), host.free_bytes()
    if whole is None or free is None:
        yield Line("memory", "look", "this system does not say how much memory is free")
        return
    text = f"{format_bytes(free)} free of {format_bytes(whole)}"
    if free < LITTLE_MEMORY:
        yield Line("memory", "look", f"only {text}", "end other programs, or plan with --memory")
    else:
        yield Line("memory", "ok", text)


def _disk(environ: Mapping[str, str]) -> Iterator[Line]:
    cache = environ.get("PDCOMPILE_CACHE") or str(Path.home() / ".cache")
    places = {"this folder": ".", "measured times": cache if cache != "off" else ""}
    for what, place in places.items():
        there = Path(place) if place else None
        while there is not None and not there.exists() and there != there.parent:
            there = there.parent
        free = None if there is None else host.disk_bytes(there)
        if free is None:
            continue
        state: Literal["ok", "look"] = "look" if free < LITTLE_DISK else "ok"
        yield Line(
            "disk", state, f"{format_bytes(free)} free for {what} ({place})",
            "make room, or save checkpoints elsewhere" if state == "look" else "",
        )  # fmt: skip


def _network(environ: Mapping[str, str]) -> Iterator[Line]:
    found = host.interfaces()
    for name, state in found.items():
        yield Line("network", "ok", f"{name}: {state}")
    for variable in (GLOO, NCCL):
        for name in filter(None, environ.get(variable, "").strip("^=").split(",")):
            if not any(one.startswith(name) for one in found):
                yield Line(
                    "network", "wrong", f"{variable} names {name!r}, which this host does not have",
                    f"one of {', '.join(found)}, or unset it",
                )  # fmt: skip
    several = _count(environ, "WORLD_SIZE") != _count(environ, "LOCAL_WORLD_SIZE")
    one_host: Literal["ok", "look"] = "ok" if "WORLD_SIZE" in environ else "look"  # or who knows
    own = host.own_address()
    if own is not None and ipaddress.ip_address(own).is_loopback and GLOO not in environ:
        yield Line(
            "network", "wrong" if several else one_host,
            f"this host's name stands for {own}, which no other host can reach: that is enough for "
            "ranks of one host, and not for several hosts",
            f"for several hosts: {GLOO}=the interface that joins them, or the host's own address "
            "for its name in /etc/hosts",
        )  # fmt: skip
    master = environ.get("MASTER_ADDR")
    if master:
        try:
            address = socket.gethostbyname(master)
        except OSError as error:
            yield Line(
                "network", "wrong", f"MASTER_ADDR={master!r} is not found: {error}",
                "the name or address of the host with rank 0",
            )  # fmt: skip
        else:
            lone = ipaddress.ip_address(address).is_loopback
            yield Line(
                "network", "wrong" if lone and several else "ok",
                f"MASTER_ADDR={master} is {address}"
                + (", which is on each host that host itself" if lone else ""),
                "for several hosts: an address of the host with rank 0 that the others reach",
            )  # fmt: skip


def _devices(environ: Mapping[str, str]) -> Iterator[Line]:
    import torch

    count = torch.cuda.device_count()
    build = torch.version.cuda or getattr(torch.version, "hip", None)
    if not count:
        what = f"torch is built for {build}, and finds none" if build else "torch is built for CPU"
        yield Line("devices", "ok", f"no GPU: {what}; threads of torch: {torch.get_num_threads()}")
        return
    for index in range(count):
        free, whole = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Line(
            "devices", "ok", f"GPU {index}: {name}, {format_bytes(free)} free of "
            f"{format_bytes(whole)}, torch for {build}",
        )  # fmt: skip
    local = _count(environ, "LOCAL_WORLD_SIZE")
    if devices.shares():
        yield Line(
            "devices", "look", f"{devices.SHARE} is set: processes count as having a GPU each, and "
            f"share {count}, to try out what needs several; nothing is quick then",
            f"unset {devices.SHARE} to train",
        )  # fmt: skip
    elif local is not None and local > count:
        yield Line(
            "devices", "look", f"{local} processes on this host, and {count} GPUs: NCCL wants "
            "one a process",
            f"torchrun --nproc-per-node={count}",
        )  # fmt: skip


def _plan(path: Path, processes: int | None, environ: Mapping[str, str]) -> Iterator[Line]:
    import torch

    try:
        plan = Plan.load(path)
    except PdcompileError as error:
        yield Line("plan", "wrong", f"{path}: {error.message}", error.remedy or "")
        return
    world = processes or _count(environ, "WORLD_SIZE")
    missing = list(
        lacks(
            plan,
            processes=world,
            on_this_host=_count(environ, "LOCAL_WORLD_SIZE"),
            memory_bytes=host.memory_bytes(),
            gpus=torch.cuda.device_count(),
            where=str(path),
        )
    )
    for one in missing:
        yield Line("plan", "wrong", f"{path}: {one.message}", one.remedy or "")
    if not missing:
        where = "one process" if world is None else f"{world} processes"
        yield Line("plan", "ok", f"{path}: its {plan.num_ranks} ranks can run in {where} here")


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
