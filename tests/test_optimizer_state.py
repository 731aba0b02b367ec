"""The optimizer's state by the names of parameters: one form for every plan, and for torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from pdcompile.checkpoint.named_optimizer import NamedGroup
from pdcompile.errors import ConfigError, InputError
from pdcompile.runtime.state.whole_state import whole_groups
from tests.helpers.changes import Rich
from tests.helpers.launch import processes
from tests.helpers.resuming import ADAMW, pipeline, same, train


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    matrices = [p for _, p in parameters.named if p.ndim > 1]
    vectors = [p for _, p in parameters.named if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.005}], lr=0.02
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("tied", [False, True])
def test_torch_takes_it_and_gives_it_back(tied: bool) -> None:
    pipe = pipeline("1f1b", tied=tied)
    train(pipe, 0, 3)
    state = pipe.full_optimizer_state_dict()
    model = Rich(tied)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert list(state["state"]) == trained
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state)
    plain = optimizer.state_dict()
    assert same([*plain["state"].values()], [*state["state"].values()])
    assert optimizer.param_groups[0]["lr"] == 0.02
    other = pipeline("1f1b", 3, tied=tied)
    other.load_state_dict(pipe.full_state_dict())
    with pytest.raises(InputError, match=r"numbers of parameters(.|\n)*get_optimizer_state_dict"):
        other.load_optimizer_state_dict(plain)
    other.load_optimizer_state_dict(copy.deepcopy(state))
    assert same(other.full_optimizer_state_dict(), state)
    other.close()
    train(pipe, 3, 4)
    assert not same(pipe.full_optimizer_state_dict(), state)


def test_it_has_the_form_of_distributed_checkpoint() -> None:
    pipe = pipeline("2bw")
    train(pipe, 0, 3)
    ours, model = pipe.full_optimizer_state_dict(), Rich(tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ours["state"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    ours["param_groups"][0]["params"] = [*ours["state"]]
    set_optimizer_state_dict(model, optimizer, ours, options=StateDictOptions(strict=True))
    theirs = get_optimizer_state_dict(model, optimizer)
    assert same(theirs["state"], ours["state"])
    again = pipeline("2bw", 3)
    again.load_state_dict(pipe.full_state_dict())
    theirs["param_groups"][0]["params"] += ["fixed.weight", "fixed.bias"]
    again.load_optimizer_state_dict(theirs)
    assert same(again.full_optimizer_state_dict()["state"], ours["state"])


def test_groups_keep_their_settings() -> None:
    pipe = pipeline("1f1b", optimizer=two_groups)
    train(pipe, 0, 2)
    pipe.optimizer.param_groups[1]["lr"] = 0.003
    state = pipe.full_optimizer_state_dict()
    assert [group["lr"] for group in state["param_groups"]] == [0.02, 0.003]
    assert "second.bias" in state["param_groups"][1]["params"]
    other = pipeline("1f1b", 3, optimizer=two_groups)
    other.load_optimizer_state_dict(state)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.02, 0.003]
    one = pipeline("1f1b", 3)
    with pytest.raises(InputError, match=r"in one group .* saved with (lr|weight_decay)="):
        one.load_optimizer_state_dict(state)
    assert not one.optimizer.state


def test_groups_of_ranks_that_made_others_stay_apart() -> None:
    """A rank without parameters of a group has another one in its place."""
    made = [
        NamedGroup(0, ("b",), {"lr": 1.0}, "AdamW"), NamedGroup(1, ("d",), {"lr": 2.0}, "AdamW"),
        NamedGroup(0, ("c",), {"lr": 2.0}, "AdamW"), NamedGroup(0, ("e",), {"lr": 1.0}, "SGD"),
        NamedGroup(0, ("a",), {"lr": 1.0}, "AdamW"), NamedGroup(1, (), {"lr": 3.0}, "AdamW"),
        NamedGroup(2, (), {"lr": 4.0}, "AdamW"),
    ]  # fmt: skip
    assert whole_groups(made, {name: n for n, name in enumerate("abcde")}) == [
        {"lr": 1.0, "params": ["a", "b"]}, {"lr": 2.0, "params": ["c"]},
        {"lr": 1.0, "params": ["e"]}, {"lr": 2.0, "params": ["d"]}, {"lr": 4.0, "params": []},
    ]  # fmt: skip


def test_what_is_no_state_of_the_model_changes_nothing() -> None:
    pipe = pipeline("1f1b")
    train(pipe, 0, 2)
    state = pipe.full_optimizer_state_dict()
    wrong = copy.deepcopy(state)
    wrong["state"]["second.weight"]["exp_avg"] = torch.zeros(3)
    missing = copy.deepcopy(state)
    missing["param_groups"][0]["params"].remove("second.weight")
    for given, message in (
        ([1], "is list"),
        (wrong, r"exp_avg of second.weight is \(3,\)"),
        (missing, "no settings of second.weight"),
    ):
        with pytest.raises(InputError, match=message):
            pipe.load_optimizer_state_dict(given)
        assert same(pipe.full_optimizer_state_dict(), state)
    with pytest.raises(InputError, match="2 parameters, and this process updates 12"):
        pipe.optimizer.load_state_dict(
            torch.optim.SGD([torch.zeros(1), torch.ones(1)]).state_dict()
        )
    train(pipe, 2, 3)


def test_without_an_optimizer_there_is_none() -> None:
    pipe = pipeline("1f1b", optimizer=None)
    with pytest.raises(ConfigError, match="no optimizer"):
        pipe.load_optimizer_state_dict({})


RANKS = """
    import copy, sys, warnings
    import torch
    from pdcompile.errors import InputError
    from tests.helpers import resuming
    from tests.test_optimizer_state import two_groups

    mode, place = sys.argv[1:]
    pipe = resuming.pipeline("1f1b", 3, optimizer=two_groups)
    if mode == "save":
        resuming.train(pipe, 0, 3)
        rank = pipe.ranks[0]
        whole, state = pipe.full_optimizer_state_dict(), pipe.full_state_dict()
        resuming.train(pipe, 3, 4)
        again = pipe.full_optimizer_state_dict()  # over the same channels
        assert bool(again) == (rank == 0)
        torch.save(pipe.optimizer.state_dict(), f"{place}/part-{rank}.pt")
        if rank == 0:
            torch.save((state, whole), f"{place}/all.pt")
    else:
        state, whole = torch.load(f"{place}/all.pt")
        pipe.load_state_dict(state)
        try:
            pipe.optimizer.load_state_dict(whole)
        except InputError as error:
            print("refused:", error.remedy)
        pipe.load_optimizer_state_dict(whole)
        again = pipe.full_optimizer_state_dict()
        print("equal" if pipe.ranks[0] or resuming.same(again, whole) else "differ")
        losses = resuming.train(pipe, 3, 5)
        print("losses", losses)
    pipe.close()
"""


@pytest.mark.slow
def test_it_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    run = processes(RANKS, 3, tmp_path, "save", str(tmp_path))
    assert run.code == 0, str(run)
    state, whole = torch.load(tmp_path / "all.pt", weights_only=True)
    alone = pipeline("1f1b", optimizer=two_groups)
    expected = train(pipeline("1f1b", 3, optimizer=two_groups), 0, 5)[3:]
    alone.load_state_dict(state)
    alone.load_optimizer_state_dict(whole)
    assert same(alone.full_optimizer_state_dict(), whole)
    assert train(alone, 3, 5) == expected
    part = torch.load(tmp_path / "part-1.pt", weights_only=True)
    with pytest.raises(InputError, match="full_optimizer_state_dict"):
        alone.load_optimizer_state_dict(part)
    with pytest.raises(InputError, match="it is of other stages"):
        alone.optimizer.load_state_dict(part)
    run = processes(RANKS, 3, tmp_path, "load", str(tmp_path))
    assert run.code == 0, str(run)
    assert run.output.count("equal\n") == 3, str(run)
    assert run.output.count("refused: pipe.load_optimizer_state_dict") == 3, str(run)
    assert run.output.count(f"losses {expected}") == 3, str(run)


def test_the_default_of_torch_is_what_it_fits() -> None:
    """Trained on with plain torch, from there on by hand."""
    pipe = pipeline("1f1b")
    train(pipe, 0, 2)
    model = pipe.to_model()
    optimizer = ADAMW(list(model.parameters()))
    optimizer.load_state_dict(pipe.full_optimizer_state_dict())
    assert {int(one["step"]) for one in optimizer.state.values()} == {2}
