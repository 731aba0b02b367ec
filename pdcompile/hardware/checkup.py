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
from typing import Literal, TypeAlias

import torch

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


State: TypeAlias = Literal["ok", "look", "wrong"]
Said: TypeAlias = tuple[State, str] | tuple[State, str, str]  # state, text, remedy


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at; `remedy` says what to do where it is not ok."""

    about: str
    state: State
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
    parts = {
        "versions": _versions(),
        "processes": _processes(environ, processes),
        "memory": _memory(),
        "disk": _disk(environ),
        "network": _network(environ),
        "devices": _devices(environ),
        "plan": () if plan is None else _plan(plan, processes, environ),
    }
    return [Line(about, *said) for about, part in parts.items() for said in part]


def _versions() -> Iterator[Said]:
    needs: list[str] = []
    try:
        needs = requires("pdcompile") or []
    except PackageNotFoundError:
        text = (
            "pdcompile runs from a folder that is not installed, so that versions cannot be held "
            "against those that it wants"
        )
        yield "look", text, "pip install -e . in it"
    pattern = r"([A-Za-z0-9_.-]+)([<>=!~0-9.,]*)"  # what only an extra wants has a marker behind it
    found = (re.fullmatch(pattern, text.replace(" ", "")) for text in needs)
    wanted = {match[1]: match[2] for match in found if match}
    yield "ok", f"pdcompile {pdcompile.__version__}"
    yield "ok", f"Python {platform.python_version()}, {platform.platform()}"
    for name in dict.fromkeys((*SHOWN, *wanted)):
        limits = wanted.get(name, "")
        try:
            has = version(name)
        except PackageNotFoundError:
            if name in wanted:
                yield "wrong", f"{name} is not installed", f"pip install '{name}{limits}'"
            continue
        if not in_range(has, limits):
            yield "wrong", f"{name} {has} is not {limits}", f"pip install '{name}{limits}'"
        elif name in SHOWN:
            yield "ok", f"{name} {has}"


def _processes(environ: Mapping[str, str], wanted: int | None) -> Iterator[Said]:
    world, local = (_count(environ, f"{of}WORLD_SIZE") or wanted for of in ("", "LOCAL_"))
    threads, here, cores = _count(environ, "OMP_NUM_THREADS"), local or 1, host.cores()
    if world is None:
        yield "ok", f"one process, {cores} cores"
    else:
        part = "" if local in (None, world) else f", {local} of them on this host"
        yield "ok", f"{world} processes{part}, {cores} cores here"
    if threads is None:
        text = (
            "OMP_NUM_THREADS is not set: torchrun sets it to 1, and times are measured with as "
            "many threads as a run has"
        )
        yield "look", text, "OMP_NUM_THREADS=1, or cores divided by processes of a host"
    elif threads * here > cores:
        text = f"{here} processes of {threads} threads share {cores} cores: a step takes longer "
        text += "than forecast"
        fewer = f"OMP_NUM_THREADS={cores // here}, or " if here <= cores else ""
        yield "look", text, f"{fewer}fewer processes a host"
    else:
        yield "ok", f"OMP_NUM_THREADS={threads}"


def _memory() -> Iterator[Said]:
    whole, free = host.memory_bytes(), host.free_bytes()
    if whole is None or free is None:
        yield "look", "this system does not say how much memory is free"
        return
    text = f"{format_bytes(free)} free of {format_bytes(whole)}"
    if free < LITTLE_MEMORY:
        yield "look", f"only {text}", "end other programs, or plan with --memory"
    else:
        yield "ok", text


def _disk(environ: Mapping[str, str]) -> Iterator[Said]:
    cache = environ.get("PDCOMPILE_CACHE") or str(Path.home() / ".cache")
    places = {"this folder": "."} | ({"measured times": cache} if cache != "off" else {})
    for what, place in places.items():
        there = Path(place)
        while not there.exists() and there != there.parent:
            there = there.parent
        free = host.disk_bytes(there)
        if free is not None:
            text = f"{format_bytes(free)} free for {what} ({place})"
            little: Said = "look", text, "make room, or save checkpoints elsewhere"
            yield little if free < LITTLE_DISK else ("ok", text)


def _network(environ: Mapping[str, str]) -> Iterator[Said]:
    found = host.interfaces()
    for name, state in found.items():
        yield "ok", f"{name}: {state}"
    for variable in (GLOO, NCCL):
        for name in filter(None, environ.get(variable, "").strip("^=").split(",")):
            if not any(one.startswith(name) for one in found):
                text = f"{variable} names {name!r}, which this host does not have"
                yield "wrong", text, f"one of {', '.join(found)}, or unset it"
    several = _count(environ, "WORLD_SIZE") != _count(environ, "LOCAL_WORLD_SIZE")
    one_host: State = "ok" if "WORLD_SIZE" in environ else "look"  # or who knows
    own = host.own_address()
    if own is not None and ipaddress.ip_address(own).is_loopback and GLOO not in environ:
        text = (
            f"this host's name stands for {own}, which no other host can reach: that is enough for "
            "ranks of one host, and not for several hosts"
        )
        remedy = (
            f"for several hosts: {GLOO}=the interface that joins them, or the host's own address "
            "for its name in /etc/hosts"
        )
        yield "wrong" if several else one_host, text, remedy
    if master := environ.get("MASTER_ADDR"):
        try:
            address = socket.gethostbyname(master)
        except OSError as error:
            text = f"MASTER_ADDR={master!r} is not found: {error}"
            yield "wrong", text, "the name or address of the host with rank 0"
            return
        lone = ipaddress.ip_address(address).is_loopback
        text = f"MASTER_ADDR={master} is {address}"
        text += ", which is on each host that host itself" if lone else ""
        remedy = "for several hosts: an address of the host with rank 0 that the others reach"
        yield "wrong" if lone and several else "ok", text, remedy


def _devices(environ: Mapping[str, str]) -> Iterator[Said]:
    count = torch.cuda.device_count()
    build = torch.version.cuda or getattr(torch.version, "hip", None)
    if not count:
        what = f"torch is built for {build}, and finds none" if build else "torch is built for CPU"
        yield "ok", f"no GPU: {what}; threads of torch: {torch.get_num_threads()}"
        return
    for index in range(count):
        free, whole = torch.cuda.mem_get_info(index)
        memory = f"{format_bytes(free)} free of {format_bytes(whole)}"
        yield "ok", f"GPU {index}: {torch.cuda.get_device_name(index)}, {memory}, torch for {build}"
    local = _count(environ, "LOCAL_WORLD_SIZE")
    if devices.shares():
        text = (
            f"{devices.SHARE} is set: processes count as having a GPU each, and share {count}, to "
            "try out what needs several; nothing is quick then"
        )
        yield "look", text, f"unset {devices.SHARE} to train"
    elif local is not None and local > count:
        text = f"{local} processes on this host, and {count} GPUs: NCCL wants one a process"
        yield "look", text, f"torchrun --nproc-per-node={count}"


def _plan(path: Path, processes: int | None, environ: Mapping[str, str]) -> Iterator[Said]:
    try:
        plan = Plan.load(path)
    except PdcompileError as error:
        yield "wrong", f"{path}: {error.message}", error.remedy or ""
        return
    world = processes or _count(environ, "WORLD_SIZE")
    missing = [
        *lacks(
            plan,
            processes=world,
            on_this_host=_count(environ, "LOCAL_WORLD_SIZE"),
            memory_bytes=host.memory_bytes(),
            gpus=torch.cuda.device_count(),
        )
    ]
    for one in missing:
        yield "wrong", f"{path}: {one.message}", one.remedy or ""
    if not missing:
        where = "one process" if world is None else f"{world} processes"
        yield "ok", f"{path}: its {plan.num_processes} ranks can run in {where} here"


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
