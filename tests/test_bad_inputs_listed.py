"""A hundred bad inputs: each is refused by its code, by name and with a remedy, and leaves nothing.

Nothing is written into the working folder, and no port is left open.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile
from pdcompile import Apart, Cluster, CutAt, Forbid, MaxStages, Pin, Together
from pdcompile.errors import PdcompileError
from tests.helpers import models

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.filterwarnings("ignore:.*(nested|quantized|target size)"),
]
SHARED = pytest.mark.usefixtures("one_capture_a_model")
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
    """What the cases find: a pipeline that none of them may break, and files of its own."""

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


@pytest.fixture(scope="module")
def pipe() -> Iterator[Any]:
    torch.manual_seed(0)
    made = prepared(optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    yield made
    before = float(made.eval_step(X, target=X).loss)
    made.step(X, target=X)  # none of them broke it
    assert float(made.eval_step(X, target=X).loss) < before
    made.close()


@pytest.fixture
def given(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    folder, here = tmp_path / "given", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    (folder / "plan.json").write_text(pipe.plan.to_json())
    monkeypatch.chdir(here)
    return Given(pipe, folder)


def listening() -> set[str]:
    """The sockets of this process that listen, by inode."""
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    opened = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            opened.add(os.readlink(entry))
        except OSError:  # the one that lists the folder
            continue
    return {row[9] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in opened}


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
ENTRY = {"key": "k", "target": "t", "forward_seconds": -1.0}
SLOWER = {"torch_version": "2", "device": "cpu", "microbatch_size": 2, "entries": [ENTRY]}
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
        "'layers_0' is on no stage",
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
        "fingerprint of the graph differs",
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
        "CONFIG",
        "microbatches=3",
        edited(lambda d: d["training"].update(num_microbatches=3)),
    ),
    "plan: other minibatches": (
        "PLAN",
        "this one has 6",
        lambda g: prepared(None, torch.ones(6, 16), torch.ones(6, 16), plan=g.pipe.plan),
    ),
    "plan: a schedule": (
        "PLAN",
        "file of a schedule",
        lambda g: prepared(plan=g.file("p.json", '{"ranks": ["0F0 0B0"]}')),
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
    "costs: a plan": ("COST", "plan.json", lambda g: prepared(costs=str(g.folder / "plan.json"))),
    "costs: NUL in its name": ("COST", "cannot read", with_options(costs="a\0b.json")),
    "costs: negative": (
        "COST",
        "negative",
        lambda g: prepared(
            costs=g.file("c.json", json.dumps(SLOWER | {"schema": "pdcompile.profile/3"}))
        ),
    ),
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
        "no backward",
        lambda g: prepared(schedule=g.file("s.csv", "0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n")),
    ),
    "schedule: in a circle": (
        "DEADLOCK",
        "waits for",
        lambda g: prepared(schedule=g.file("s.csv", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")),
    ),
    "sources: a file": ("PLAN", "plan.json", lambda g: prepared(sources=g.folder / "plan.json")),
    "sources: NUL in its name": ("CONFIG", "sources=", with_options(sources="a\0b")),
    "dump: into a file": ("SOURCE", "is a file", lambda g: g.pipe.dump(g.folder / "plan.json")),
    "dump: into a link": (
        "SOURCE",
        "symbolic link",
        lambda g: (os.symlink("/tmp", g.folder / "link"), g.pipe.dump(g.folder / "link")),
    ),
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

PLANNER: dict[str, Case] = {
    "stages: a billion": ("CLUSTER", "1000000000 stages", with_options(stages=10**9)),
    "microbatches: a billion": (
        "CONFIG",
        "1000000000 microbatches",
        with_options(microbatches=10**9),
    ),
    "replicas: none": ("CONFIG", "replicas=0", with_options(replicas=0)),
    "replicas: negative": ("CONFIG", r"replicas=\(1, -1\)", with_options(replicas=(1, -1))),
    "replicas: a word": ("CONFIG", "many", with_options(replicas="many")),
    "replicas: of three stages": (
        "CONFIG",
        r"replicas=\(1, 1, 1\)",
        with_options(replicas=(1, 1, 1)),
    ),
    "memory: one byte": ("INFEASIBLE", "1 B", with_options(memory=1)),
    "memory: a list": ("CONFIG", "memory", with_options(memory=[1])),
    "memory: NaN": ("CONFIG", "nan", with_options(memory=float("nan"))),
    "memory: too large": ("CONFIG", "too large", with_options(memory="9" * 99 + " GB")),
    "a device without memory": (
        "INFEASIBLE",
        "memory",
        lambda g: prepared(cluster=g.file("c.toml", UNLIKE)),
    ),
    "a module on two stages": (
        "INFEASIBLE",
        "contradictory pins",
        with_options(constraints=[Pin("layers.0", 0), Pin("layers.0", 1)]),
    ),
    "pins against the flow": (
        "INFEASIBLE",
        "Pin",
        with_options(constraints=[Pin("layers.0", 1), Pin("layers.5", 0)]),
    ),
    "a pin to no stage": ("CONFIG", "9", with_options(constraints=[Pin("layers.0", 9)])),
    "a pin of nothing": ("CONFIG", "nobody", with_options(constraints=[Pin("nobody", 0)])),
    "a pin without a name": ("CONFIG", "Pin", lambda _: Pin("", 0)),
    "a pin to half a stage": ("CONFIG", "0.5", lambda _: Pin("a", 0.5)),  # type: ignore[arg-type]
    "together and apart": (
        "INFEASIBLE",
        "Apart",
        with_options(constraints=[Together("layers.*"), Apart("layers.0", "layers.2")]),
    ),
    "apart from nothing": ("CONFIG", "two patterns", lambda _: Apart("a")),
    "cuts at nothing": ("CONFIG", "nothing", with_options(constraints=[CutAt("nothing.*")])),
    "forbidden everywhere": (
        "INFEASIBLE",
        "Forbid",
        with_options(constraints=[Forbid("layers.0", 0, 1)]),
    ),
    "at most True stages": ("CONFIG", "True", lambda _: MaxStages(True)),
    "batch_dims: no such dimension": ("INPUT", "dimension -9", with_options(batch_dims=-9)),
    "batch_dims: no such input": ("CONFIG", "nobody", with_options(batch_dims={"nobody": 0})),
    "time_limit: NaN": ("CONFIG", "time_limit=nan", with_options(time_limit=float("nan"))),
    "time_limit: text": ("CONFIG", "time_limit='1'", with_options(time_limit="1")),
}

MODELS: dict[str, Case] = {
    "a branch on values": (
        "TRACE",
        "__bool__.*test_bad_inputs_listed.py",
        model_of(lambda m, x: m.lin(x) if x.sum() > 0 else x),
    ),
    "a counter": ("TRACE", "attribute calls", model_of(counted)),
    "Python's random": ("TRACE", "random", model_of(lambda m, x: m.lin(x) * random.random())),
    "a boolean mask": ("TRACE", "__getitem__", model_of(lambda m, x: m.lin(x)[x > 0])),
    "a sparse parameter": (
        "TRACE",
        "'table'.*sparse",
        model_of(lambda m, x: m.lin(x), table=nn.Parameter(torch.eye(16).to_sparse())),
    ),
    "an error in forward": ("TRACE", "ZeroDivisionError", model_of(lambda m, x: 1 / 0)),
    "a recursion": ("TRACE", "RecursionError", model_of(lambda m, x: m(x))),
    "no output": ("TRACE", "NoneType", model_of(lambda m, x: None)),
    "nothing to cut": ("INFEASIBLE", "2 stages for 1", lambda _: prepared(Forward(lambda m, x: x))),
    "compiled": (
        "TRACE",
        "OptimizedModule",
        lambda _: prepared(torch.compile(models.mlp(), backend="eager")),
    ),  # type: ignore[arg-type]
    "wrapped": ("TRACE", "DataParallel", lambda _: prepared(nn.DataParallel(models.mlp()))),
    "lazy": ("TRACE", "'weight'", lambda _: prepared(nn.LazyLinear(16))),
    "no tensor": ("TRACE", "str", with_options(x="x")),
    "numpy": ("INPUT", "numpy array", with_options(x=X.numpy())),
    "sparse": ("INPUT", "sparse_coo", with_options(x=X.to_sparse())),
    "nested": ("INPUT", "nested", lambda _: prepared(x=nested())),
    "quantized": (
        "INPUT",
        "quantized",
        lambda _: prepared(x=torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)),
    ),
    "no samples": ("INPUT", "no samples", with_options(x=X[:0], target=X[:0])),
    "loss: raises": ("TRACE", "ZeroDivisionError", with_loss(lambda y, t: 1 / 0)),
    "loss: None": ("TRACE", "None", with_loss(lambda y, t: None)),
    "loss: a number": ("TRACE", "Python number", with_loss(lambda y, t: 1.0)),
    "loss: item()": (
        "TRACE",
        "item",
        with_loss(lambda y, t: torch.tensor(F.mse_loss(y, t).item())),
    ),
    "loss: a vector": ("TRACE", r"\(16,\)", with_loss(lambda y, t: (y - t).mean(0))),
    "loss: a tuple": ("TRACE", "tuple", with_loss(lambda y, t: (F.mse_loss(y, t), 1))),
    "optimizer: none": ("CONFIG", "NoneType", with_options(optimizer=lambda parameters: None)),
    "optimizer: asks for a closure": ("CONFIG", "LBFGS", with_options(optimizer=torch.optim.LBFGS)),
    "optimizer: of other parameters": (
        "CONFIG",
        "not given.*(3,)",
        with_options(optimizer=lambda _: torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1)),
    ),
}

RUN: dict[str, Case] = {
    "nothing": ("INPUT", "argument: 'x'", stepped()),
    "None": ("INPUT", "x", stepped(None)),
    "a list": ("INPUT", "x", stepped([X])),
    "another dtype": ("INPUT", "int64", stepped(X.long())),
    "another width": ("INPUT", r"\(4, 15\)", stepped(X[:, :15])),
    "no rows": ("INPUT", "samples", stepped(X[:0], target=X[:0])),
    "rows without targets": ("INPUT", "target|x", stepped(X, target=X[:3])),
    "a target that is text": ("INPUT", "target", stepped(X, target="x")),
    "an unknown argument": ("INPUT", "'foo'", stepped(X, foo=1)),
    "complex": ("INPUT", "complex64", stepped(X.to(torch.complex64))),
    "nested": ("INPUT", "nested", lambda g: g.pipe.step(nested(), target=X)),
    "no tuple of arguments": ("INPUT", "of type int", lambda g: g.pipe.step_call(3, target=X)),
    "a list of names": ("INPUT", "and list", lambda g: g.pipe.step_call((X,), ["mask"])),
    "step after close": ("CLOSED", "was closed", lambda g: closed(g).step(X, target=X)),
    "predict after close": ("CLOSED", "was closed", lambda g: closed(g).predict(X)),
    "save after close": ("CLOSED", "was closed", lambda g: closed(g).save("x")),
    "save before the first step": ("NOTPREPARED", "no plan yet", lambda _: pipe_of().save("x")),
    "parameters before the first step": (
        "NOTPREPARED",
        "no plan yet",
        lambda _: list(pipe_of().parameters()),
    ),
    "gradients under 2bw": (
        "CONFIG",
        "2bw",
        lambda _: prepared(schedule="2bw").forward_backward(X, target=X),
    ),
    "a negative norm": (
        "CONFIG",
        "max_norm=-1",
        lambda _: prepared(optimizer=None).clip_grad_norm_(-1),
    ),
    "a state of another model": (
        "INPUT",
        "nobody",
        lambda g: g.pipe.load_state_dict({"nobody": X}),
    ),
    "no state": ("INPUT", "NoneType", lambda g: g.pipe.load_state_dict(None)),
    "an optimizer without state": (
        "INPUT",
        "state|optimizer",
        lambda g: g.pipe.load_optimizer_state_dict({}),
    ),
    "RANK is too large": (
        "LAUNCH",
        "RANK is 7",
        launched(**HERE | {"RANK": "7", "MASTER_PORT": "1"}),
    ),
    "a port that is none": ("LAUNCH", "99999", launched(**HERE | {"MASTER_PORT": "99999"})),
    "a port that is a word": ("LAUNCH", "port", launched(**HERE | {"MASTER_PORT": "port"})),
    "no MASTER_ADDR": (
        "LAUNCH",
        "MASTER_ADDR",
        launched(WORLD_SIZE="2", RANK="0", MASTER_PORT="1"),
    ),
}


def refuse(case: Case, given: Given) -> None:
    """The case ends in one error as it should be, and nothing is left of it."""
    code, offender, call = case
    ports = listening()
    with pytest.raises(PdcompileError) as caught:
        call(given)
    error = caught.value
    assert error.code == f"PDC-{code}"
    assert re.search(offender, f"{error.message} {error.where}"), str(error)
    assert error.remedy
    assert list(Path.cwd().iterdir()) == []
    assert listening() <= ports


@SHARED
@pytest.mark.parametrize("name", FILES)
def test_files(name: str, given: Given) -> None:
    refuse(FILES[name], given)


@SHARED
@pytest.mark.parametrize("name", PLANNER)
def test_what_the_planner_is_asked(name: str, given: Given) -> None:
    refuse(PLANNER[name], given)


@pytest.mark.parametrize("name", MODELS)
def test_models_losses_and_optimizers(name: str, given: Given) -> None:
    refuse(MODELS[name], given)


@SHARED
@pytest.mark.parametrize("name", RUN)
def test_calls_and_processes(name: str, given: Given) -> None:
    refuse(RUN[name], given)


def test_there_are_a_hundred() -> None:
    assert sum(map(len, (FILES, PLANNER, MODELS, RUN))) >= 100
