"""Weights once a host: ranks of dispatched stages have them in one memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor

from pdcompile import Pipeline
from pdcompile.cluster import Cluster
from tests.helpers.alike import COMMON, compiled
from tests.helpers.launch import processes
from tests.helpers.models import batch_for, gpt, mlp, unet
from tests.helpers.simulated_gpu import SimulatedGpu
from tests.test_device import IN_THE_END, SIMULATED

PIPES = (
    COMMON
    + """
class Elsewhere(torch.optim.SGD):  # a step that puts new weights into other memory
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.1 * parameter.grad

def pipeline(model, optimizer=partial(torch.optim.SGD, lr=0.1), **options):
    x, y = models.batch_for(model, 8)
    import pdcompile
    given = dict(loss_fn=models.loss_for(model), optimizer=optimizer, schedule=sys.argv[1],
                 microbatches=2 * world, costs="estimated", verify="off", progress=False,
                 stages=world + 1, updates="home") | options
    twin = copy.deepcopy(model)
    pipe = pdcompile.compile(model, x, example_target=y, **given).prepare(x, target=y)
    return pipe, reference(twin, loss_fn=given["loss_fn"], optimizer=optimizer, plan=pipe.plan,
                           schedule=sys.argv[1], microbatches=2 * world)

def trained(model, pipe, twin, steps=3):
    for t in range(steps):
        x, y = models.batch_for(model, 8, t)
        for one in (pipe, twin):
            one.step(x, target=y)
    ours, theirs = pipe.state_dict(), twin.full_state_dict()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=2e-5 * (world > 2))
    return next(pipe.parameters())
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["round", "round-2bw"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_one_memory(tmp_path: Path, schedule: str, ranks: int) -> None:
    """Two of them sum as the reference does, bit for bit.  Also what a step puts elsewhere comes
    there; states load as before; after the pipeline each rank has the weights for itself."""
    script = PIPES + dedent("""
    for optimizer in (partial(torch.optim.SGD, lr=0.1), partial(Elsewhere, lr=0.1)):
        sys.platform = "linux" if optimizer.func is Elsewhere else "another"
        model = models.mlp()
        pipe, twin = pipeline(model, optimizer)
        before = copy.deepcopy(pipe.state_dict())
        pipe.load_state_dict({name: value * 0.5 for name, value in before.items()})
        twin.load_state_dict({name: value * 0.5 for name, value in before.items()})
        weight = trained(model, pipe, twin)
        name = weight.untyped_storage().filename
        assert name.startswith("/proc/") if sys.platform == "linux" else not Path(name).exists()
        weight = weight.data.clone()
        pipe.close()
        after = next(model.parameters())
        assert torch.equal(after.data, weight)
        after.data += rank
        meet("closed" + optimizer.func.__name__)
        assert torch.equal(after.data, weight + rank)
    say("once")
    """)
    run = processes(script, ranks, tmp_path, schedule)
    assert run.code == 0, run
    assert run.output.count("once") == ranks, run


@pytest.mark.slow
def test_writes_of_one_rank_are_refused(tmp_path: Path) -> None:
    """A product that every rank writes to memory that all of them read is made several times."""
    script = PIPES + dedent("""
    model = models.mlp()
    pipe, twin = pipeline(model, stages=1)
    weight, (x, y) = trained(model, pipe, twin), models.batch_for(model, 8)
    try:
        pipeline(model, schedule="1f1b", stages=1, replicas=2, updates="every")
    except ConfigError as error:
        say("SECOND", error.message)
    meet("second")
    weight.data[0] *= 2.0
    try:
        pipe.step(x, target=y)
    except ConfigError as error:
        say("REFUSED", error.message)
    """)
    run = processes(script, 2, tmp_path, "round")
    assert run.output.count("SECOND another pipeline of this model has its weights") == 2, run
    assert run.output.count("REFUSED a parameter was changed that other ranks") == 2, run


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["round", "round-2bw"])
def test_a_checkpoint_goes_on(tmp_path: Path, schedule: str) -> None:
    """Older versions and optimizers too: as if nothing had been saved."""
    script = PIPES + dedent("""
    options = dict(optimizer=partial(torch.optim.AdamW, lr=0.01), max_grad_norm=0.5)
    def steps(pipe, some):
        for t in some:
            x, y = models.batch_for(whole, 8, t)
            pipe.step(x, target=y)

    whole = models.unet()
    one, two, three = (pipeline(copy.deepcopy(whole), **options)[0] for _ in range(3))
    steps(one, range(6))
    steps(two, range(3))
    steps(three, range(4))  # of another history
    two.save("saved")
    three.load("saved")
    steps(three, range(3, 6))
    if sys.argv[1] == "round-2bw":
        steps(two, range(3, 6))
        assert not states_equal(two.full_state_dict(), three.full_state_dict())
    assert not states_equal(one.full_state_dict(), three.full_state_dict())
    for pipe in (one, two, three):
        pipe.close()
    say("goes on")
    """)
    run = processes(script, 2, tmp_path, schedule)
    assert run.code == 0, run
    assert run.output.count("goes on") == 2, run


@pytest.mark.parametrize(
    ("build", "ranks", "options"),
    [
        (mlp, 2, {"schedule": "round"}),
        pytest.param(unet, 3, {"schedule": "round-2bw"}, marks=pytest.mark.slow),
        pytest.param(
            partial(gpt, layers=3, tied=True, dropout=0.1), 2, {"schedule": "round"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            partial(gpt, layers=3, tied=True), 2, {"schedule": "round-2bw"}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_weights_rest_on_the_host_of_gpus(build: Any, ranks: int, options: Any) -> None:
    """Each run of a stage copies what it has and no more; the bits are the CPU's."""
    cluster = Cluster.local(ranks)
    given = {"stages": 5, "microbatches": 4, "recompute": True, "updates": "home", **options}
    given["optimizer"] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

    def trained() -> tuple[Pipeline, list[Tensor]]:
        pipe, model = compiled(build, cluster=cluster, **given).prepare(), build()
        losses = []
        for t, size in enumerate((8, 3, 8)):
            x, y = batch_for(model, size, t)
            losses += [float(pipe.step(x, target=y).loss), float(pipe.eval_step(x, target=y).loss)]
        state = [one.clone() for one in pipe.full_state_dict().values()]
        return pipe, [torch.tensor(losses), *state]

    _, expected = trained()
    with SimulatedGpu() as gpu:
        pipe, found = trained()
        resting = {gpu.memory(one).kind for one in pipe.parameters()}
        assert pipe.plan.fetched
    atol = 2e-5 * bool(pipe.plan.tied)  # sums go by cuts, which are others
    torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)
    assert (resting, gpu.violations) == ({"pinned"}, [])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nccl", "tags"])
@pytest.mark.parametrize("schedule", ["round", "round-2bw"])
def test_ranks_have_weights_from_one_memory(tmp_path: Path, schedule: str, transport: str) -> None:
    script = (
        SIMULATED.format(transport=transport)
        + PIPES
        + dedent("""
    for options in ({}, {"max_grad_norm": 0.5}):
        model = models.unet()
        pipe, twin = pipeline(model, partial(torch.optim.AdamW, lr=0.01), recompute=True, **options)
        pipe.load_state_dict({f: one * 0.5 for f, one in twin.full_state_dict().items()})
        twin.load_state_dict({f: one * 0.5 for f, one in twin.full_state_dict().items()})
        weight = trained(model, pipe, twin) if not options else next(pipe.parameters())
        assert gpu.memory(weight).kind == "pinned" and pipe.plan.fetched
        x, y = models.batch_for(model, 8)
        pipe.step(x, target=y)
        pipe.close()
    """)
        + IN_THE_END
    )
    run = processes(script, 2, tmp_path, schedule)
    assert run.code == 0, run
    assert run.output.count("in order, copied") == 2, run
