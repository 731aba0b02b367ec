"""Transports in device order, and training over them: the same as over tags."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from pdcompile.cluster import Cluster
from pdcompile.errors import LaunchError
from pdcompile.hardware import devices
from pdcompile.plan import Edge, Plan
from pdcompile.runtime.transport.contract import Channel, Expected
from pdcompile.runtime.transport.launch import DataPath, data_path
from pdcompile.runtime.transport.links import Link, pairs
from pdcompile.runtime.transport.point_to_point import GroupTransport
from pdcompile.schedule import Kind, Phase
from pdcompile.schedule.instruction import DATA
from pdcompile.schedule.registry import KINDS
from tests.helpers.alike import COMMON, compiled
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, mlp, unet
from tests.helpers.schedules import chain, make_plan, plans
from tests.test_check import programs_of
from tests.test_programs import cases
from tests.test_runtime_distributed import BITWISE, FAILURES, OWN_LOOP

# -- the transport -------------------------------------------------------------------------------


class Group:
    """A process group that notes what it is given; everything is over at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def send(self, _: list[torch.Tensor], peer: int, tag: int) -> Group:
        self.calls.append(("send", peer, tag))
        return self

    def recv(self, _: list[torch.Tensor], peer: int, tag: int) -> Group:
        self.calls.append(("recv", peer, tag))
        return self

    def allreduce(self, _: list[torch.Tensor]) -> Group:
        return self

    def wait(self) -> None:
        pass


def test_control_has_tags_and_data_has_none() -> None:
    control, lower, upper = Group(), Group(), Group()
    data = Link({0: lower, 2: upper}, 1)
    transport = GroupTransport(control, rank=1, plan=7, reach=2, data=data)
    value = Channel(Kind.VALUE, 5, 2)
    transport.outgoing(value).send(torch.zeros(3), 0).wait()
    transport.outgoing(value).send(torch.zeros(3), 0).wait()
    transport.outgoing(Channel(Kind.LOSS, 0, 0)).send(torch.zeros(()), 0).wait()
    transport.incoming(Channel(Kind.CALL, 0, 0)).receive(Expected((3,), torch.int64, 0), 0).wait()
    transport.incoming(Channel(Kind.GRADIENT, 1, 0)).receive(Expected((3,), torch.float32, 0), 0)
    headers = [("send", 2, value.tag), ("send", 0, int(Kind.LOSS)), ("recv", 0, 29)]
    assert [one for one in control.calls if one in headers] == [
        ("send", 2, value.tag), ("send", 0, int(Kind.LOSS)), ("send", 0, int(Kind.LOSS)),
    ]  # fmt: skip
    assert upper.calls == [("send", 1, 0), ("send", 1, 0)]
    assert lower.calls == []  # before its header was read


@settings(max_examples=60)
@given(plans(several=True))
def test_there_are_groups_for_what_programs_send_and_no_others(plan: Plan) -> None:
    count = plan.training.num_microbatches
    sent = set()
    for program in (
        *programs_of(plan, (count,) * 12),
        *(case[0] for case in cases(plan, count) if not case[2]),
    ):
        for rank, column in enumerate(program.columns):
            sent |= {
                tuple(sorted((rank, one.peer)))
                for one in column
                if one.action.kind in DATA and one.action.phase is Phase.SEND
            }
    found = pairs(plan.spec)
    assert found == sorted(found)
    assert {pair for pair in sent if pair[0] != pair[1]} <= set(found)
    updates_each = KINDS[plan.training.schedule].updates_each
    if updates_each or count % lcm(*map(len, plan.spec.ranks)) == 0:
        assert set(found) == {pair for pair in sent if pair[0] != pair[1]}


def test_replicas_meet_only_those_of_their_turn() -> None:
    plan = make_plan("1f1b", 2, 4, replicas=(2, 2))
    assert pairs(plan.spec) == [(0, 2), (1, 3)]
    edges = (*chain(2), Edge("more", 0, (1,), 1, False))
    assert pairs(make_plan("1f1b", 2, 4, edges=edges).spec) == [(0, 1)]


def test_another_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(make_plan("1f1b", 2, 4), cluster=Cluster.local(2).to_toml())
    on_gpus = replace(plan, cluster=Cluster.local(2, kind="h100").to_toml())

    def chosen(wanted: str, plan: Plan = plan, *, alone: bool = False) -> DataPath:
        monkeypatch.setenv("PDCOMPILE_TRANSPORT", wanted)
        return data_path(plan, alone=alone)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(devices, "gpus", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert chosen("") is chosen("tags") is DataPath.TAGS
    assert chosen("ordered") is DataPath.ORDERED
    with pytest.raises(LaunchError, match="'infiniband'"):
        chosen("infiniband")
    with pytest.raises(LaunchError, match="is 'nccl', and the plan has CPUs on ranks 0, 1"):
        chosen("nccl")
    assert chosen("nccl", on_gpus) is chosen("", on_gpus) is DataPath.NCCL
    assert chosen("tags", on_gpus) is chosen("nccl", on_gpus, alone=True) is DataPath.TAGS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # ranks share a GPU, as NCCL has it on demand alone
    assert chosen("", on_gpus) is DataPath.TAGS
    assert chosen("nccl", on_gpus) is DataPath.NCCL
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert chosen("", on_gpus) is DataPath.TAGS
    with pytest.raises(LaunchError, match="'nccl', and this torch is built without NCCL"):
        chosen("nccl", on_gpus)


# -- running -------------------------------------------------------------------------------------

TIED = partial(gpt, tied=True)
LOCAL: list[tuple[Any, dict[str, Any]]] = [
    (mlp, {"schedule": "interleaved", "stages": 4}),
    (TIED, {"schedule": "gpipe", "stages": 3}),
    (unet, {"schedule": "1f1b", "stages": 3, "replicas": (2, 1, 1)}),
    (TIED, {"schedule": "2bw", "stages": 3}),
    (mlp, {"schedule": "stash", "stages": 3, "microbatches": 1, "max_grad_norm": None}),
    (TIED, {"schedule": "vsync", "stages": 2, "microbatches": 1}),
    (TIED, {"schedule": "zb-h1", "stages": 2}),
    (mlp, {"schedule": "zb-v", "stages": 4, "replicas": 2}),
]


def trained(build: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """Losses of minibatches of several sizes, an evaluation and the state."""
    model = build()
    pipe = compiled(lambda: model, **{"microbatches": 4, **options})
    losses = []
    for t, size in enumerate((8, 8, 3, 8)):
        x, y = batch_for(model, size, t)
        losses.append(pipe.step(x, target=y).loss)
    losses.append(pipe.eval_step(x, target=y).loss)
    found = [torch.tensor(float(loss)) for loss in losses]
    found += [pipe.predict(x), *pipe.full_state_dict().values()]
    pipe.close()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("build", "options"), LOCAL)
def test_in_one_process_it_is_the_same(
    build: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDCOMPILE_TRANSPORT", raising=False)
    tagged = trained(build, options)
    monkeypatch.setenv("PDCOMPILE_TRANSPORT", "ordered")
    ordered = trained(build, options)
    assert all(torch.equal(a, b) for a, b in zip(tagged, ordered, strict=True))


RANKS = (
    COMMON
    + """
import ast
from tests.test_device_order_run import trained
# On ranks every schedule over tags, and in device order: to the bit the same.
for name, options in ast.literal_eval(sys.argv[1]):
    build = {"gpt": partial(models.gpt, tied=True)}.get(name) or getattr(models, name)
    found = []
    for transport in ("", "ordered"):
        os.environ["PDCOMPILE_TRANSPORT"] = transport
        found.append(trained(build, {"outputs": "all", **options}))
    unlike = [n for n, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]
    assert not unlike, (name, options, unlike)
say("equal")
"""
)


def on_ranks(cases: list[tuple[str, dict[str, Any]]], num_ranks: int, folder: Path) -> None:
    run = processes(RANKS, num_ranks, folder, repr(cases))
    assert run.code == 0, run
    assert run.output.count("equal") == num_ranks, run


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("2bw", marks=pytest.mark.slow)])
def test_a_schedule_on_two_ranks(tmp_path: Path, schedule: str) -> None:
    on_ranks([("mlp", {"schedule": schedule})], 2, tmp_path)


SINGLE = {"microbatches": 1, "max_grad_norm": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("gpt", {"schedule": name}) for name in ("gpipe", "2bw", "zb-h1")]),
        (2, [("gpt", {"schedule": name, "stages": 4}) for name in ("interleaved", "zb-v")]),
        (2, [("gpt", {"schedule": "vsync", "microbatches": 1}),
             ("unet", {"schedule": "stash", **SINGLE})]),
        (3, [("unet", {"schedule": "1f1b", "replicas": (1, 2)}),
             ("gpt", {"schedule": "2bw", "replicas": (2, 1)}),
             ("mlp", {"schedule": "stash", "replicas": (1, 2), **SINGLE})]),
        (4, [("gpt", {"schedule": "gpipe", "replicas": 2, "stages": 2}),
             ("mlp", {"schedule": "zb-v", "replicas": 2, "stages": 4}),
             ("convnet", {"schedule": "1f1b", "replicas": (2, 2)})]),
    ],
)  # fmt: skip
def test_every_schedule_on_ranks(
    ranks: int, cases: list[tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    on_ranks(cases, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "said"),
    [
        (BITWISE, 3, "equal"),
        (OWN_LOOP, 2, "refused: GPT: this model is split over several ranks"),
        (FAILURES, 3, "packages rank"),
    ],
)
def test_scripts_of_the_runtime_in_device_order(
    script: str, ranks: int, said: str, tmp_path: Path
) -> None:
    """Ranks do in device order what they do over tags: also fail, and say why."""
    first = 'import os; os.environ["PDCOMPILE_TRANSPORT"] = "ordered"\n'
    run = processes(first + script, ranks, tmp_path)
    assert run.code == 0, run
    assert run.output.count(said) == ranks, run


def test_ranks_agree_on_the_order(tmp_path: Path) -> None:
    script = (
        COMMON
        + """
if rank:
    os.environ["PDCOMPILE_TRANSPORT"] = "ordered"
try:
    pair(models.mlp(), "1f1b")
except LaunchError as error:
    say("refused:", error.message)
"""
    )
    run = processes(script, 2, tmp_path)
    assert run.output.count("PDCOMPILE_TRANSPORT is tags on rank 0, ordered on rank 1") == 2, run
