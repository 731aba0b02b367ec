"""The runtime on several ranks: real processes and gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.alike import COMMON
from tests.helpers.launch import processes

BITWISE = (
    COMMON
    + """
def compare(model, schedule, wait=True, **given):
    pipe, eager = pair(model, schedule, outputs="all", **given)
    results = []
    for t, size in enumerate([8, 8, 5, 8, 2, 8]):
        inputs, target = models.batch_for(model, size, t)
        results.append((pipe.step(inputs, target=target), eager.step(inputs, target=target)))
        if wait:
            assert float(results[-1][0].loss) == float(results[-1][1].loss)
    for ours, theirs in results:
        assert float(ours.loss) == float(theirs.loss)
        assert torch.equal(ours.outputs, theirs.outputs)
    full, part = pipe.full_state_dict(), pipe.state_dict()
    theirs = eager.full_state_dict()
    assert not states_equal(full, theirs if rank == 0 else {})
    assert part and not states_equal(part, {name: theirs[name] for name in part})
    ours, theirs = (p.eval_step(inputs, target=target) for p in (pipe, eager))
    assert float(ours.loss) == float(theirs.loss)
    assert torch.equal(ours.outputs, theirs.outputs)
    assert torch.equal(pipe.predict(inputs), eager.predict(inputs))
    trained = pipe.to_model()
    if rank == 0:
        assert not states_equal(trained.state_dict(), eager.state_dict())
        assert trained.eval()(inputs).shape == ours.outputs.shape
    pipe.close()

compare(models.gpt(layers=2, dropout=0.1), "2bw", max_grad_norm=0.3, wait=False)
compare(models.unet(), "1f1b" if world == 2 else "gpipe")
say("equal")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_train_like_the_reference(tmp_path: Path, num_ranks: int) -> None:
    run = processes(BITWISE, num_ranks, tmp_path)
    assert run.code == 0, run
    assert run.output.count("equal") == num_ranks, run


OWN_LOOP = (
    COMMON
    + """
pipe, eager = pair(models.gpt(layers=2), "1f1b", keep_model=True)
mine, theirs = (torch.optim.SGD(list(p.parameters()), lr=0.1) for p in (pipe, eager))
for t in range(3):
    inputs, target = models.batch_for("gpt", 8, t)
    mine_only = inputs if "ids" in pipe.needs else None, target if "target" in pipe.needs else None
    loss = pipe.forward_backward(mine_only[0], target=mine_only[1]).loss
    assert float(loss) == float(eager.forward_backward(inputs, target=target).loss)
    gradients = dict(eager.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, gradients[name].grad), name
    assert torch.equal(pipe.clip_grad_norm_(0.5), eager.clip_grad_norm_(0.5))
    before = [float(p.eval_step(inputs, target=target).loss) for p in (pipe, eager)]
    assert before[0] == before[1]  # tied copies follow the update that is to come all the same
    mine.step(), theirs.step(), pipe.zero_grad(), eager.zero_grad()
    part, whole = pipe.state_dict(), eager.state_dict()
    assert not states_equal(part, {name: whole[name] for name in part})
assert not states_equal(pipe.full_state_dict(), eager.state_dict() if rank == 0 else {})
say("needs", *pipe.needs)

pipe, _ = pair(models.gpt(layers=1), "1f1b")
pipe.step(inputs, target=target)  # nobody asks for this loss
model = pipe._model
held = {name for name, p in model.named_parameters() if not p.is_meta}
assert held == {name for name in pipe.state_dict() if name in dict(model.named_parameters())}
try:
    model(inputs)
except ConfigError as error:
    say("refused:", error.message)
pipe.close()
try:
    model.state_dict()  # would be tensors without values
except ConfigError as error:
    say("no state:", error.remedy)
"""
)


@pytest.mark.slow
def test_each_rank_has_its_part_of_the_model(tmp_path: Path) -> None:
    run = processes(OWN_LOOP, 2, tmp_path)
    assert run.code == 0, run
    assert "[0] needs ids\n" in run.output, run
    assert "[1] needs target\n" in run.output, run
    assert run.output.count("refused: GPT: this model is split over several ranks") == 2, run
    assert run.output.count("no state: pipe.full_state_dict()") == 2, run


FAILURES = (
    COMMON
    + """
def case(name, act):
    pipe, _ = pair(models.gpt(layers=1), "2bw" if name == "target" else "1f1b")
    inputs, target = models.batch_for("gpt", 8)
    pipe.step(inputs, target=target)
    meet(name)
    try:
        act(pipe, inputs, target)
        say(name, "no error")
    except Exception as error:
        say(name, type(error).__name__, str(error).splitlines()[0])
    try:
        pipe.step(inputs, target=target)
    except ClosedError:
        say(name, "closed")

def bad_input(pipe, inputs, target):
    inputs[5, 3] = 1000
    pipe.step(inputs, target=target)

def bad_target(pipe, inputs, target):
    target = target.clone()  # microbatches in flight still need the other one
    target[5, 3] = 1000
    pipe.step(inputs, target=target)
    pipe.flush()

def user_error(pipe, inputs, target):
    with pipe:
        if rank == world - 1:
            raise ValueError("a bug of the user's")
        pipe.step(inputs, target=target)

case("input", bad_input)
case("target", bad_target)
case("batch", lambda p, x, y: p.step(*models.batch_for("gpt", 8, rank)[:1], target=y))
case("size", lambda p, x, y: p.step(x[rank:], target=y[rank:]))
case("call", lambda p, x, y: p.step(x, target=y) if rank else (p.flush(), p.step(x, target=y)))
case("user", user_error)
try:
    pair(models.mlp(), "1f1b", stages=world + 1)
except LaunchError as error:
    say("launch", error.message)
torch.__version__ = f"{torch.__version__}.{rank}"  # a rank with other packages
try:
    pair(models.mlp(), "1f1b")
except LaunchError as error:
    say("packages", error.message)
"""
)


@pytest.mark.slow
def test_every_rank_raises_the_first_cause(tmp_path: Path) -> None:
    run = processes(FAILURES, 3, tmp_path)
    assert run.code == 0, run
    where = "stage 0, forward of minibatch 1, microbatch 2, stage_0.py:"
    assert "[0] input IndexError index out of range" in run.output, run
    assert "[2] target IndexError Target 1000 is out of bounds" in run.output, run
    for rank in (1, 2):
        assert f"[{rank}] input RankError another rank failed first: rank 0, {where}" in run.output
        assert f"[{rank}] batch ContractError rank 0 has other values in input 'ids'" in run.output
        assert f"[{rank}] size ContractError rank 0 has a minibatch of 8 samples" in run.output
        assert f"[{rank}] call ContractError rank 0 is in call 2, flush" in run.output, run
    assert "[0] call RankError another rank failed first: rank" in run.output, run
    for rank in (0, 1):
        line = f"[{rank}] target RankError another rank failed first: rank 2, stage 2"
        assert line in run.output, run
        line = f"[{rank}] user RankError another rank failed first: rank 2: ValueError"
        assert line in run.output, run
    for rank in range(3):
        assert f"[{rank}] launch the plan has 4 ranks, and 3 processes are running" in run.output
        assert f"[{rank}] packages rank" in run.output, run
    assert run.output.count("closed\n") == 18, run
    assert "no error" not in run.output, run


KILLED = (
    COMMON
    + """
pipe, _ = pair(models.mlp(), "1f1b")
inputs, target = models.batch_for("mlp", 8)
pipe.step(inputs, target=target)
pipe.flush()
meet("stepped")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    pipe.step(inputs, target=target)
except RankError as error:
    say("RankError", error.message)
"""
)


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    run = processes(KILLED, 2, tmp_path)
    assert run.code != 0, run
    first = "another rank failed first: rank 1 ended without an error of its own"
    assert f"[0] RankError {first} (it was ended by SIGKILL" in run.output, run
    assert "; noticed by rank 0" in run.output, run


EARLY = (
    COMMON
    + """
pipe, _ = pair(models.gpt(layers=1), "1f1b")
inputs, target = models.batch_for("gpt", 8)
pipe.step(inputs, target=target)
meet("stepped")
try:
    pipe.close() if rank == 0 else pipe.step(inputs, target=target)
except (RankError, ContractError) as error:
    say(type(error).__name__, error.message)
"""
)


@pytest.mark.slow
def test_a_rank_that_closes_early(tmp_path: Path) -> None:
    run = processes(EARLY, 2, tmp_path)
    assert "[0] RankError another rank failed first: rank 1: ContractError" in run.output, run
    assert "[1] ContractError rank 0 is in call 2, close" in run.output, run


TIED = (
    COMMON
    + """
pipe, _ = pair(models.gpt(layers=1), "1f1b")
inputs, target = models.batch_for("gpt", 8)
pipe.step(inputs, target=target)
meet("stepped")
with torch.no_grad():
    for parameter in pipe.parameters():
        parameter.mul_(0.9)
try:
    pipe.step(inputs, target=target)
except (RankError, ConfigError) as error:
    say(type(error).__name__, error.message)
"""
)


@pytest.mark.slow
def test_a_changed_parameter_that_other_ranks_copied(tmp_path: Path) -> None:
    run = processes(TIED, 2, tmp_path)
    assert "[0] ConfigError a parameter was changed that other ranks hold copies of" in run.output
    assert "[1] RankError another rank failed first: rank 0 refused the call" in run.output, run
