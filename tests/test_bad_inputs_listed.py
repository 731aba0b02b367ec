"""A hundred bad inputs: each is refused by its code, by name and with a remedy, and leaves nothing.

Nothing is written into the working folder, and no port is left open.
"""

from __future__ import annotations

import functools
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pdcompile import Apart, CutAt, Pin, Together
from pdcompile.errors import PdcompileError
from tests.helpers import models
from tests.helpers.bad_inputs import (
    FILES,
    HERE,
    UNLIKE,
    Case,
    Forward,
    Given,
    X,
    closed,
    counted,
    launched,
    model_of,
    nested,
    pipe_of,
    prepared,
    stepped,
    with_loss,
    with_options,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested|quantized|target size)")


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
    "apart from nothing": ("CONFIG", "2 or more, got", lambda _: Apart("a")),
    "cuts at nothing": ("CONFIG", "nothing", with_options(constraints=[CutAt("nothing.*")])),
    "a pin to stage True": ("CONFIG", "True", lambda _: Pin("a", True)),
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


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, given: Given) -> None:
    refuse(FILES[name], given)


@pytest.mark.parametrize("name", PLANNER)
def test_what_the_planner_is_asked(name: str, given: Given) -> None:
    refuse(PLANNER[name], given)


@pytest.mark.parametrize("name", MODELS)
def test_models_losses_and_optimizers(name: str, given: Given) -> None:
    refuse(MODELS[name], given)


@pytest.mark.parametrize("name", RUN)
def test_calls_and_processes(name: str, given: Given) -> None:
    refuse(RUN[name], given)


def test_there_are_a_hundred() -> None:
    assert sum(map(len, (FILES, PLANNER, MODELS, RUN))) >= 100
