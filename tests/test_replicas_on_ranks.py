"""Stages with replicas, running on ranks: what the reference computes, and replicas that part."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcompile.errors import LaunchError
from pdcompile.options import Options
from pdcompile.runtime.failure.first_cause import Verdict
from tests.helpers.alike import COMMON
from tests.helpers.launch import processes

TORCHRUN = (
    COMMON
    + """
import pdcompile
def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-5)

for build, schedule, outputs in ((models.mlp, "1f1b", "all"), (models.unet, "2bw", "none")):
    model = build()
    common = dict(loss_fn=models.loss_for(model), optimizer=partial(torch.optim.SGD, lr=0.1),
                  schedule=schedule, microbatches=4, max_grad_norm=0.3)
    eager = reference(copy.deepcopy(model), **common)
    inputs, target = models.batch_for(model, 8)
    pipe = pdcompile.compile(model, inputs, example_target=target, replicas=REPLICAS,
                             outputs=outputs, costs="estimated", verify="off", **common)
    for t, size in enumerate([8, 1, 5, 8]):
        inputs, target = models.batch_for(eager.to_model(), size, t)
        ours, theirs = (one.step(inputs, target=target) for one in (pipe, eager))
        assert abs(float(ours.loss) - float(theirs.loss)) < 2e-5
        if outputs == "all":
            torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=0, atol=2e-5)
    ours, theirs = (one.predict(inputs) for one in (pipe, eager))
    if rank == pipe.plan.stages[-1].ranks[0] or outputs == "all":
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    else:
        assert ours is None
    full, part = pipe.full_state_dict(), pipe.state_dict()
    close(full, eager.full_state_dict() if rank == 0 else {})
    close(part, {name: value for name, value in eager.full_state_dict().items() if name in part})
    # replicas hold equal weights, to the bit
    stage = next(stage for stage in pipe.plan.stages if rank in stage.ranks)
    torch.save(part, f"{schedule}.{rank}.pt")
    meet(schedule)
    other = torch.load(f"{schedule}.{stage.ranks[0]}.pt")
    assert not states_equal(part, other)
    if schedule == "1f1b":
        pipe.forward_backward(inputs, target=target)
        eager.forward_backward(inputs, target=target)
        gradients = {name: one.grad for name, one in eager.named_parameters()}
        for name, one in pipe.named_parameters():
            torch.testing.assert_close(one.grad, gradients[name], rtol=0, atol=2e-5)
    pipe.close()
say("equal")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas",
    [(2, 1), pytest.param((1, 2, 1), marks=pytest.mark.slow),
     pytest.param((2, 2), marks=pytest.mark.slow), pytest.param((4,), marks=pytest.mark.slow)],
)  # fmt: skip
def test_on_ranks(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    run = processes(TORCHRUN.replace("REPLICAS", repr(replicas)), sum(replicas), tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == sum(replicas), run


APART = (
    COMMON
    + """
import pdcompile
class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter))

torch.manual_seed(rank)
schedule, change = sys.argv[1:]
model = models.mlp(layers=2)
x, y = models.batch_for(model, 8)
optimizer = partial(Noisy if change == "noise" else torch.optim.SGD, lr=0.1)
pipe = pdcompile.compile(
    model, x, example_target=y, loss_fn=models.loss_for(model), optimizer=optimizer,
    microbatches=2, stages=1, replicas=2, schedule=schedule, costs="estimated", verify="off",
)
passed = "began"
try:
    for t in range(6):
        pipe.step(x, target=y)
        if t == 1:
            pipe.flush()
        if t == 1 and rank == 1 and change == "write":
            next(pipe.parameters()).data.mul_(0.5)
        if t == 1 and rank == 1 and change == "middle":
            weight = next(pipe.parameters()).data.view(-1)
            weight[weight.numel() // 2] += 1.0
        if t == 1 and rank == 1 and change == "rate":
            pipe.optimizer.param_groups[0]["lr"] = 0.5
    passed = "trained"
    pipe.full_state_dict()
    passed = "went through"
    pipe.close()
    say(passed)
except (ContractError, RankError) as error:
    assert "different values of this parameter" in str(error), error
    say(passed, "and refused")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "change", "end"),
    [
        ("1f1b", "rate", "began and refused"),
        ("1f1b", "noise", "began and refused"),
        # Not with each minibatch, which would read all weights each time: before a state is read.
        ("1f1b", "middle", "trained and refused"),
        ("2bw", "write", "began and refused"),
        ("2bw", "nothing", "went through"),
    ],
)
def test_replicas_that_part_are_noticed(
    tmp_path: Path, schedule: str, change: str, end: str
) -> None:
    """A change that one rank alone makes to its weights would train two models at one time."""
    run = processes(APART, 2, tmp_path, schedule, change)
    if run.code == Verdict.CRASH.exit_code and "refused" in end:
        # The connection broke inside of a message, of which gloo then never says that it failed:
        # the watchdog has ended that rank, with the same report.
        assert run.output.count(end) == 1, run
        assert "different values of this parameter" in run.output, run
        return
    assert run.code == 0, run
    assert run.output.count(end) == 2, run


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdcompile.options.configuration import machines

    with pytest.raises(LaunchError, match=r"2 stages on 3 ranks, but WORLD_SIZE is 4"):
        machines(Options(replicas=(2, 1)), 4)
