"""Calls that are refused: pipelines, models, losses and files with one thing wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile import Cluster
from tests.helpers import models

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def pipe_of(model: nn.Module | None = None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "loss_fn": F.mse_loss,
        "costs": "estimated",
        "microbatches": 2,
        "stages": 2,
        "verify": "off",
    }
    return pdcompile.compile(models.mlp() if model is None else model, **given | options)


def prepared(model: nn.Module | None = None, x: Any = X, target: Any = X, **options: Any) -> Any:
    return pipe_of(model, **options).prepare(x, target=target)


@dataclass(frozen=True)
class Given:
    """Files that the cases find: a pipeline that none of them may break, and files of its own."""

    pipe: Any
    folder: Path

    def plan(self, change: Callable[[Any], Any]) -> str:
        """The name of a plan as somebody edited it."""
        data = json.loads((self.folder / "plan.json").read_text())
        change(data)
        (self.folder / "edited.json").write_text(json.dumps(data))
        return str(self.folder / "edited.json")

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)


class Forward(nn.Module):
    """A linear layer, and a forward that is the test's."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.calls = 0
        for name, part in parts.items():
            setattr(self, name, part)
        self.given = forward

    def forward(self, x: Tensor) -> Any:
        return self.given(self, x)


def counted(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.lin(x)  # type: ignore[no-any-return]


def model_of(forward: Callable[[Any, Tensor], Any], **parts: Any) -> Callable[[Given], Any]:
    return lambda _: prepared(Forward(forward, **parts), stages=1)


def with_loss(loss_fn: Any) -> Callable[[Given], Any]:
    return lambda _: prepared(loss_fn=loss_fn)


def with_options(**options: Any) -> Callable[[Given], Any]:
    return lambda _: prepared(**options)


def cluster(text: str) -> Callable[[Given], Any]:
    return lambda given: pipe_of(cluster=given.file("cluster.toml", text))


def edited(change: Callable[[Any], Any]) -> Callable[[Given], Any]:
    return lambda given: prepared(plan=given.plan(change))


def stepped(*args: Any, target: Any = X, **kwargs: Any) -> Callable[[Given], Any]:
    return lambda given: given.pipe.step(*args, target=target, **kwargs)


def nested() -> Tensor:
    return torch.nested.nested_tensor([X[0], X[1]], layout=torch.strided)


def closed(_: Given) -> Any:
    made = prepared()
    made.close()
    return made


def launched(**variables: str) -> Callable[[Given], Any]:
    def start(_: Given) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            prepared()

    return start


TWO = '[[devices]]\ncount = 2\n[[levels]]\nname = "a"\nsize = 2\n'
UNLIKE = """
[[devices]]
count = 1
memory = "0 B"
[[devices]]
count = 1
memory = "1 GB"
[[levels]]
name = "a"
size = 2
bandwidth = "1 GB/s"
"""
HERE = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": "0"}
Case = tuple[str, str, Callable[[Given], Any]]

FILES: dict[str, Case] = {
    "plan: a folder without one": (
        "PLAN",
        "cannot read.*given",
        lambda g: prepared(plan=g.folder / "x"),
    ),
    "plan: NUL in its name": ("CONFIG", r"a\\x00b", lambda _: prepared(plan="a\0b")),
    "plan: endless": ("PLAN", "more than .* bytes", lambda _: prepared(plan="/dev/zero")),
    "plan: a number": ("CONFIG", "plan=3", with_options(plan=3)),
    "plan: empty": ("PLAN", "empty", lambda g: prepared(plan=g.file("p.json", ""))),
    "plan: truncated": (
        "PLAN",
        "not JSON",
        lambda g: prepared(plan=g.file("p.json", g.pipe.plan.to_json()[:99])),
    ),
    "plan: an op missing": (
        "PLAN",
        "'layers_0' .* is on no stage",
        edited(lambda d: d["stages"][0]["ops"].pop(0)),
    ),
    "plan: an op twice": (
        "PLAN",
        "assigned twice",
        edited(lambda d: d["stages"][1]["ops"].append("layers_0")),
    ),
    "plan: an unknown op": (
        "PLAN",
        "'stranger'",
        edited(lambda d: d["stages"][0]["ops"].append("stranger")),
    ),
    "plan: an op with a newline": (
        "PLAN",
        r"'a\\nb'",
        edited(lambda d: d["stages"][0]["ops"].append("a\nb")),
    ),
    "plan: an op with a quote": (
        "PLAN",
        "'a\"b'",
        edited(lambda d: d["stages"][0]["ops"].append('a"b')),
    ),
    "plan: of another model": (
        "PLAN",
        "is not a fingerprint",
        edited(lambda d: d.update(fingerprint="0" * 64)),
    ),
    "plan: the loss on the first stage": (
        "PLAN",
        "stages",
        edited(lambda d: d["stages"][0]["ops"].append(d["stages"][1]["ops"].pop())),
    ),
    "plan: a certificate of nothing": (
        "PLAN",
        "objective_seconds is 0",
        edited(lambda d: d["certificate"].update(objective_seconds=0, bound_seconds=0)),
    ),
    "plan: another cluster": (
        "PLAN",
        "another cluster",
        edited(lambda d: d.update(cluster=Cluster.local(3).to_toml())),
    ),
    "plan: a rank that is none": (
        "PLAN",
        "no device 1000000000",
        edited(lambda d: d["stages"][0].update(ranks=[10**9])),
    ),
    "plan: other microbatches": (
        "PLAN",
        "problem was edited, or one of .*num_microbatches",
        edited(lambda d: d["training"].update(num_microbatches=3)),
    ),
    "plan: other minibatches": (
        "PLAN",
        "this one has 6",
        lambda g: prepared(None, torch.ones(6, 16), torch.ones(6, 16), plan=g.pipe.plan),
    ),
    "cluster: a folder": (
        "CLUSTER",
        "neither HOSTSxDEVICES",
        lambda g: pipe_of(cluster=str(g.folder)),
    ),
    "cluster: no hosts": ("CLUSTER", "0x4", with_options(cluster="0x4")),
    "cluster: too many devices": ("CLUSTER", "999999999x9", with_options(cluster="999999999x9")),
    "cluster: NUL in its name": ("CLUSTER", "cannot read", with_options(cluster="a\0b.toml")),
    "cluster: nested": ("CLUSTER", "not TOML|nested", cluster("a = " + "[" * 100_000)),
    "cluster: a key twice": (
        "CLUSTER",
        "not TOML.*line 3",
        cluster("[[devices]]\ncount = 1\ncount = 2\n"),
    ),
    "cluster: negative bandwidth": ("CLUSTER", "-1 GB/s", cluster(TWO + 'bandwidth = "-1 GB/s"\n')),
    "cluster: no bandwidth": ("CLUSTER", "bandwidth is 0", cluster(TWO + 'bandwidth = "0 GB/s"\n')),
    "cluster: infinite latency": (
        "CLUSTER",
        "1e999 s",
        cluster(TWO + 'bandwidth = "1 GB/s"\nlatency = "1e999 s"\n'),
    ),
    "cluster: an unknown key": ("CLUSTER", "colour", cluster(TWO + 'colour = "red"\n')),
    "cluster: an unknown unit": (
        "CLUSTER",
        "5 parsec",
        cluster(TWO + 'bandwidth = "1 GB/s"\nlatency = "5 parsec"\n'),
    ),
    "cluster: negative count": ("CLUSTER", "count", cluster("[[devices]]\ncount = -2\n")),
    "cluster: not UTF-8": (
        "CLUSTER",
        "UTF-8",
        lambda g: pipe_of(cluster=g.file("c.toml", b"\xff")),
    ),
    "costs: a word": ("CONFIG", "costs='guess'", with_options(costs="guess")),
    "costs: a plan": ("CONFIG", "plan.json", lambda g: prepared(costs=str(g.folder / "plan.json"))),
    "costs: NUL in its name": ("CONFIG", "costs=", with_options(costs="a\0b.json")),
    "costs: of another torch": (
        "COST",
        "torch_version is 1.0",
        with_options(costs=pdcompile.Profile("1.0", "cpu", 2, ())),
    ),
    "schedule: missing": ("SCHEDULE", "none.csv", with_options(schedule="none.csv")),
    "schedule: NUL in its name": ("SCHEDULE", "cannot read", with_options(schedule="a\0b.csv")),
    "schedule: not UTF-8": (
        "SCHEDULE",
        "b.csv",
        lambda g: prepared(schedule=g.file("b.csv", b"\xff\x00")),
    ),
    "schedule: of other stages": (
        "CONFIG",
        "written for 1",
        lambda g: prepared(schedule=g.file("s.csv", "0F0,0B0\n")),
    ),
    "schedule: without a backward": (
        "SCHEDULE",
        "not one forward and one backward",
        lambda g: prepared(schedule=g.file("s.csv", "0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n")),
    ),
    "schedule: in a circle": (
        "DEADLOCK",
        "waits for",
        lambda g: prepared(schedule=g.file("s.csv", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")),
    ),
    "sources: a file": ("PLAN", "plan.json", lambda g: prepared(sources=g.folder / "plan.json")),
    "sources: NUL in its name": ("CONFIG", "sources=", with_options(sources="a\0b")),
    "dump: into a file": ("SOURCE", "File exists", lambda g: g.pipe.dump(g.folder / "plan.json")),
    "dump: where nobody may write": ("SOURCE", "/proc/x", lambda g: g.pipe.dump("/proc/x")),
    "dump: NUL in its name": ("SOURCE", r"a\\x00b", lambda g: g.pipe.dump("a\0b")),
    "weights: missing": ("CONFIG", "none.safetensors", with_options(weights="none.safetensors")),
    "weights: a number": ("CONFIG", "weights=3", with_options(weights=3)),
    "weights: a pickle": (
        "CONFIG",
        "w.pt",
        lambda g: (torch.save({}, g.folder / "w.pt"), prepared(weights=g.folder / "w.pt")),
    ),
    "weights: garbage": (
        "CONFIG",
        "w.safetensors",
        lambda g: prepared(weights=g.file("w.safetensors", b"\xff" * 99)),
    ),
    "save: into a file": (
        "CHECKPOINT",
        "plan.json",
        lambda g: prepared().save(g.folder / "plan.json"),
    ),
    "save: where nobody may write": ("CHECKPOINT", "/proc/x", lambda _: prepared().save("/proc/x")),
    "save: NUL in its name": ("CONFIG", r"a\\x00b", lambda g: g.pipe.save("a\0b")),
    "save: a number": ("CONFIG", "3 is no path", lambda g: g.pipe.save(3)),
    "load: NUL in its name": ("CONFIG", r"a\\x00b", lambda g: g.pipe.load("a\0b")),
    "load: a number": ("CONFIG", "3 is no path", lambda g: g.pipe.load(3)),
    "load: a file": ("CHECKPOINT", "plan.json", lambda g: g.pipe.load(g.folder / "plan.json")),
    "load: an empty folder": (
        "CHECKPOINT",
        "given",
        lambda g: (g.folder.joinpath("plan.json").unlink(), g.pipe.load(g.folder)),
    ),
    "resume: a number": ("CONFIG", "resume=3", with_options(resume=3)),
}
