"""Weight stashing with replicas (PipeDream's 1F1B-RR), against its recurrence."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pdcompile
from pdcompile.errors import ConfigError
from tests.helpers import models
from tests.helpers.launch import processes
from tests.test_updates_each import equal_states, in_between, nothing, options_of, prepared, train

PLAIN = partial(torch.optim.SGD, lr=0.05)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
COUNTS = [(2, 1), (3, 1), (1, 2, 1), (2, 2), (4,)]
State = dict[str, Tensor]


def by_hand(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    stages: Sequence[Sequence[str]],
    replicas: Sequence[int],
    warmup: Sequence[int],
    rate: Callable[[int, int], float],
) -> tuple[list[float], State]:
    """The recurrence as PipeDream counts it, microbatches from 1; plain gradient descent.

    `rate(k, s)`: the learning rate of stage s that was set when microbatch k came.
    """
    named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    versions = [[{name: named[name] for name in names}] for names in stages]
    waiting: list[list[State]] = [[] for _ in stages]
    loss_fn, losses = models.loss_for(model), []
    for k, (x, y) in enumerate(batches, start=1):
        used: State = {}
        for s, (count, depth) in enumerate(zip(replicas, warmup, strict=True)):
            used |= versions[s][max(0, ceil(k / count) - 1 - depth)]
        leaves = {name: value.clone().requires_grad_() for name, value in used.items()}
        loss = loss_fn(functional_call(model, leaves, (x,)), y)
        found = torch.autograd.grad(loss, list(leaves.values()))
        gradients = dict(zip(leaves, found, strict=True))
        losses.append(float(loss.detach()))
        for s, (names, count) in enumerate(zip(stages, replicas, strict=True)):
            waiting[s].append({name: gradients[name] for name in names})
            if k % count == 0:
                newest = versions[s][-1]
                mean = {n: sum(one[n] for one in waiting[s]) / count for n in names}
                versions[s].append({n: newest[n] - rate(k, s) * mean[n] for n in names})
                waiting[s] = []
    return losses, {name: value for one in versions for name, value in one[-1].items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("replicas", COUNTS)
@pytest.mark.parametrize("deeper", [0, 1])
def test_it_computes_the_recurrence(replicas: tuple[int, ...], deeper: int) -> None:
    """Pipeline and reference, with a learning rate that changes; a group that is not complete at
    the end is in no update."""
    torch.manual_seed(0)
    model = models.mlp(layers=4)
    given = options_of(model, "stash", optimizer=partial(torch.optim.SGD, lr=0.2))
    depths: Sequence[int] = ()
    if deeper:
        plan = prepared(copy.deepcopy(model), (), replicas=replicas, **given).plan
        depths = [depth + deeper for depth in plan.training.warmup]
    twin, untrained = copy.deepcopy(model), copy.deepcopy(model)
    pipe = prepared(model, depths, replicas=replicas, **given)
    expected = pdcompile.reference(twin, plan=pipe.plan, **given)
    stages = [stage.parameters for stage in pipe.plan.stages]
    batches = [models.batch_for(model, 4, t) for t in range(11)]
    losses, weights = by_hand(
        untrained, batches, stages, replicas, pipe.plan.training.warmup, lambda k, _: 0.2 * 0.9**k
    )
    for one in (pipe, expected):
        found = []
        for k, (x, y) in enumerate(batches, start=1):
            one.optimizer.param_groups[0]["lr"] = 0.2 * 0.9**k
            found.append(one.step(x, target=y).loss)
        assert [float(loss) for loss in found] == pytest.approx(losses, abs=2e-5)
        state = one.full_state_dict()
        assert state.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=0.0, atol=2e-5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": models.mlp,
    "unet": models.unet,
    "gpt": partial(models.gpt, tied=False, dropout=0.1),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "replicas"),
    [("mlp", (2, 3)), ("unet", (2, 1)), ("gpt", (1, 2, 1)),
     *(pytest.param(name, counts, marks=pytest.mark.slow)
       for name in MODELS for counts in COUNTS)],
)  # fmt: skip
@pytest.mark.parametrize("events", [nothing, in_between])
def test_in_one_process_it_is_the_reference_to_the_last_bit(
    name: str, replicas: tuple[int, ...], events: Callable[[int, Any], None]
) -> None:
    """Replicas are summed in the order of the minibatches.  Short minibatches, a changing
    learning rate; flushes, evaluations and writes in the middle of groups."""
    torch.manual_seed(0)
    model = MODELS[name]()
    twin, options = copy.deepcopy(model), options_of(model, "stash", optimizer=SGD)
    with prepared(model, (), replicas=replicas, **options) as pipe:
        assert tuple(stage.replicas for stage in pipe.plan.stages) == replicas
        ours, plan, state = train(pipe, model, events), pipe.plan, pipe.full_state_dict()
    expected = pdcompile.reference(twin, plan=plan, **options)
    assert ours == train(expected, twin, events)
    equal_states(state, expected.full_state_dict())


def test_outputs_and_recomputation() -> None:
    model = models.mlp()
    twin, options = copy.deepcopy(model), options_of(model, "stash", optimizer=SGD)
    again = (True, False)
    pipe = prepared(model, (), replicas=(1, 3), recompute=again, **options)
    expected = pdcompile.reference(twin, plan=pipe.plan, **options)
    for t in range(7):
        x, y = models.batch_for(model, 4, t)
        ours, theirs = (one.step(x, target=y) for one in (pipe, expected))
        assert torch.equal(ours.outputs, theirs.outputs)
        assert float(ours.loss) == float(theirs.loss)
    pipe.close()


def test_statistics_are_those_of_the_replicas_until_they_are_read() -> None:
    model = models.convnet()
    pipe = prepared(model, (), replicas=(2,), **options_of(model, "stash", optimizer=SGD))
    alone = [copy.deepcopy(model), copy.deepcopy(model)]
    x, y = models.batch_for(model, 4)
    for t in range(2):
        pipe.step(x, target=y)
        alone[t].train()(x)
    found = pipe.full_state_dict()
    for name, value in alone[0].named_buffers():
        other = alone[1].get_buffer(name)
        mean = (value + other) / 2 if value.is_floating_point() else value
        torch.testing.assert_close(found[name], mean)


@pytest.mark.sample(1)
@pytest.mark.parametrize("replicas", [(1, 3), (2, 1)])
def test_learning_rates_in_proportion_to_replicas(replicas: tuple[int, ...]) -> None:
    """That of a stage is r_s / r_0 of the optimizer's, which itself stays as it is."""
    torch.manual_seed(0)
    model = models.mlp(layers=4)
    given = options_of(model, "stash", optimizer=PLAIN, linear_lr_scaling=True)
    twin, untrained = copy.deepcopy(model), copy.deepcopy(model)
    pipe = prepared(model, (), replicas=replicas, **given)
    expected = pdcompile.reference(twin, plan=pipe.plan, **given)
    batches = [models.batch_for(model, 4, t) for t in range(9)]
    for one in (pipe, expected):
        for x, y in batches:
            one.step(x, target=y)
            assert one.optimizer.param_groups[0]["lr"] == 0.05
    states = [one.full_state_dict() for one in (pipe, expected)]
    equal_states(*states)
    stages = [stage.parameters for stage in pipe.plan.stages]
    _, weights = by_hand(
        untrained, batches, stages, replicas, pipe.plan.training.warmup,
        lambda _, s: 0.05 * replicas[s] / replicas[0],
    )  # fmt: skip
    for name, value in weights.items():
        torch.testing.assert_close(states[0][name], value, rtol=0.0, atol=2e-5)
    # A plan says so: who runs it has the same training, or is told.
    assert "learning rates in proportion" in pipe.explain()
    given["linear_lr_scaling"] = False
    for refused in (partial(prepared, untrained, ()), partial(pdcompile.reference, untrained)):
        with pytest.raises(ConfigError, match="linear_lr_scaling=True, but the options ask for F"):
            refused(plan=pipe.plan, **given)
    del given["linear_lr_scaling"]
    again = pdcompile.reference(untrained, plan=pipe.plan, **given)
    for x, y in batches:
        again.step(x, target=y)
    equal_states(again.full_state_dict(), states[1])


def test_learning_rates_that_cannot_be_in_proportion() -> None:
    model = models.mlp()
    with pytest.raises(ConfigError, match="average as many minibatches"):
        pdcompile.compile(model, schedule="2bw", linear_lr_scaling=True)

    class Rateless(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

    options = options_of(model, "stash", optimizer=Rateless, linear_lr_scaling=True)
    with pytest.raises(ConfigError, match="no learning rate"):
        prepared(model, (), replicas=(2, 1), **options)


def saved(pipe: Any) -> Any:
    """The state as a file gives it back."""
    file = io.BytesIO()
    torch.save(pipe.full_state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.sample(1)
@pytest.mark.parametrize("replicas", [(3,), (2, 3)])
def test_a_state_in_the_middle_of_a_group_begins_it_anew(replicas: tuple[int, ...]) -> None:
    """The update that completes it is of the minibatches after it, as in the reference; to take a
    state changes nothing."""
    model = models.mlp()
    twin, options = copy.deepcopy(model), options_of(model, "stash", optimizer=PLAIN)
    pipe = prepared(model, (), replicas=replicas, **options)
    options["plan"] = pipe.plan
    expected = pdcompile.reference(twin, **options)
    batches = [models.batch_for(model, 4, t) for t in range(14)]
    for x, y in batches[:5]:
        pipe.step(x, target=y)
        expected.step(x, target=y)
    resumed: list[Any] = [
        prepared(copy.deepcopy(twin), (), **options),
        pdcompile.reference(copy.deepcopy(twin), **options),
    ]
    for one, state in zip(resumed, (saved(expected), saved(pipe)), strict=True):  # of the other
        one.load_state_dict(state)
    for pair in (resumed, [pipe, expected]):
        for x, y in batches[5:]:
            assert len({float(one.step(x, target=y).loss) for one in pair}) == 1
        equal_states(*(one.full_state_dict() for one in pair))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("minibatches", "warns"), [(3, False), (4, True)])
def test_the_end_says_what_waits_for_more(minibatches: int, warns: bool) -> None:
    model = models.mlp()
    pipe = prepared(model, (), replicas=(3,), **options_of(model, "stash", optimizer=PLAIN))
    for t in range(minibatches):
        x, y = models.batch_for(model, 4, t)
        pipe.step(x, target=y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.close()
    assert any("wait for more" in str(one.message) for one in caught) is warns


def test_a_state_without_the_beginning_of_a_group() -> None:
    """Its update is then of the others; a note says so."""
    model = models.mlp()
    twin, options = copy.deepcopy(model), options_of(model, "stash", optimizer=PLAIN)
    pipe = prepared(model, (), replicas=(3,), **options)
    expected = pdcompile.reference(twin, plan=pipe.plan, **options)
    x, y = models.batch_for(model, 4)
    with pytest.warns(UserWarning, match="1 of the present group are over"):
        pipe.load_state_dict({}, position=4)
    expected.load_state_dict({}, position=4)
    for _ in range(4):
        assert float(pipe.step(x, target=y).loss) == float(expected.step(x, target=y).loss)
    equal_states(pipe.full_state_dict(), expected.full_state_dict())


def test_the_planner_decides_how_many() -> None:
    model = models.mlp()
    options = options_of(model, "stash", optimizer=SGD)
    pipe = prepared(model, (), replicas="any", cluster="1x3", **options)
    x, y = models.batch_for(model, 4)
    for _ in range(4):
        pipe.step(x, target=y)
    pipe.flush()


def test_what_replicas_cannot_do_is_refused() -> None:
    model = models.mlp()
    with pytest.raises(ConfigError, match="replicas=2 under schedule='vsync'") as caught:
        prepared(model, (), replicas=2, **options_of(model, "vsync"))
    assert "stash" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="max_grad_norm under schedule='stash'"):
        prepared(model, (), replicas=2, **options_of(model, "stash", max_grad_norm=1.0))


ON_RANKS = """
    import copy, os, time
    from functools import partial
    import torch
    import pdcompile
    from pdcompile.cluster import Cluster, Device, Level
    from tests.helpers import models

    model = models.mlp()
    twin = copy.deepcopy(model)
    common = dict(loss_fn=models.loss_for(model), schedule="stash",
                  optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    batches = [models.batch_for(model, n, t) for t, n in enumerate((4, 4, 4, 3, 4, 4, 4, 4, 4))]

    def train(pipe):
        losses = [pipe.step(x, target=y).loss for x, y in batches[:5]]
        x, y = batches[0]
        losses.append(pipe.eval_step(x, target=y).loss)
        losses += [pipe.step(x, target=y).loss for x, y in batches[5:]]
        return [float(loss) for loss in losses]

    count = sum(REPLICAS)
    cluster = Cluster((Device(),) * count, (Level("host", count, 1e15),))
    pipe = pdcompile.compile(model, costs="estimated", progress=False, replicas=REPLICAS,
                             outputs="all", cluster=cluster, **common)
    losses, plan, rank = train(pipe), pipe.plan, pipe.ranks[0]
    assert all(stage.parameters for stage in plan.stages)
    state = pipe.full_state_dict()
    expected = pdcompile.reference(twin, plan=plan, **common)
    wanted = train(expected)
    assert all(abs(a - b) < 2e-5 for a, b in zip(losses, wanted, strict=True)), (losses, wanted)
    wanted = expected.full_state_dict() if rank == 0 else {}
    assert state.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(state[name], wanted[name], rtol=0, atol=2e-5)
    if rank == 0:
        torch.save(state, "unfinished.pt")
        os.rename("unfinished.pt", "state.pt")
    while not os.path.exists("state.pt"):
        time.sleep(0.01)
    state = torch.load("state.pt")
    pipe.load_state_dict(state)
    expected.load_state_dict(expected.full_state_dict())
    for x, y in batches[:4]:
        ours, theirs = (float(one.step(x, target=y).loss) for one in (pipe, expected))
        assert abs(ours - theirs) < 2e-5, (ours, theirs)
    x, y = batches[0]
    ours, theirs = (one.step(x, target=y).outputs for one in (pipe, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    pipe.close()
    print(f"<equal on {rank}>", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("replicas", COUNTS)
def test_on_ranks(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    run = processes(ON_RANKS.replace("REPLICAS", repr(replicas)), sum(replicas), tmp_path)
    assert run.code == 0, str(run)
    assert run.output.count("<equal on ") == sum(replicas), str(run)
