"""The same promise between processes: real torchrun, real gloo, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import models
from tests.helpers.launch import Run, processes, torchrun

# Each rank trains through the pipeline; rank 0 then trains the reference on the same minibatches.
TRAIN = """
    import copy, sys
    from functools import partial
    import torch
    import torch.distributed as dist
    import pdcompile
    from tests.helpers import models

    name, schedule, clip, sizes = sys.argv[1:]
    torch.manual_seed(0)
    build = {"gpt": models.gpt, "gpt-dropout": partial(models.gpt, dropout=0.1),
             "convnet": models.convnet, "unet": models.unet, "mlp": models.mlp}[name]
    model = build()
    twin = copy.deepcopy(model)
    common = dict(
        loss_fn=models.loss_for(model),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        schedule=schedule,
        microbatches=4,
        max_grad_norm=float(clip) or None,
    )
    batches = [models.batch_for(model, int(n), seed) for seed, n in enumerate(sizes.split(","))]

    def train(pipe):
        losses, decay = [], None
        for x, y in batches:
            losses.append(float(pipe.step(x, target=y).loss))
            decay = decay or torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
            decay.step()
        return losses

    pipe = pdcompile.compile(model, costs="estimated", **common)
    losses = train(pipe)
    state = pipe.full_state_dict()
    rank = pipe.ranks[0]
    pipe.close()
    expected = pdcompile.reference(twin, plan=pipe.plan, **common)
    theirs = train(expected)
    print(f"rank {rank}: losses {'equal' if losses == theirs else (losses, theirs)}", flush=True)
    if rank == 0:
        wanted = expected.full_state_dict()
        assert state.keys() == wanted.keys()
        unequal = [key for key in wanted if not torch.equal(state[key], wanted[key])]
        print(f"state {unequal or 'equal'}", flush=True)
"""


def assert_equal(run: Run, num_ranks: int) -> None:
    assert run.code == 0, str(run)
    assert run.output.count("losses equal") == num_ranks, str(run)
    assert "state equal" in run.output, str(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-dropout", "convnet", "unet"])
@pytest.mark.parametrize(
    ("schedule", "clip"), [("gpipe", "0"), ("1f1b", "0.1"), ("2bw", "0"), ("2bw", "0.1")]
)
def test_two_ranks(tmp_path: Path, name: str, schedule: str, clip: str) -> None:
    assert_equal(processes(TRAIN, 2, tmp_path, name, schedule, clip, "8,8,3,8,8,8,8"), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), [(3, "unet"), (4, "gpt"), (3, "gpt-dropout")])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_more_ranks(tmp_path: Path, num_ranks: int, name: str, schedule: str) -> None:
    run = processes(TRAIN, num_ranks, tmp_path, name, schedule, "0.1", "8,8,3,8,8,8")
    assert_equal(run, num_ranks)


GRADIENTS = """
    import copy, sys
    import torch
    import pdcompile
    from tests.helpers import models

    name, schedule = sys.argv[1:]
    model = getattr(models, name)()
    twin = copy.deepcopy(model)
    x, y = models.batch_for(model, 8, 0)
    loss_fn = models.loss_for(model)
    with pdcompile.compile(
        model, loss_fn=loss_fn, optimizer=None, schedule=schedule, microbatches=4,
        costs="estimated",
    ) as pipe:
        pipe.prepare(x, target=y)
        eager = pdcompile.reference(
            twin, plan=pipe.plan, loss_fn=loss_fn, optimizer=None, schedule=schedule, microbatches=4
        )
        for _ in range(2):  # gradients of several calls add up
            pipe.forward_backward(x, target=y)
            if pipe.plan.tied:  # each stage sums its own
                eager.forward_backward(x, target=y)
                continue
            for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
                (loss_fn(twin(a), b) * (len(a) / 8)).backward()
        theirs = dict(twin.named_parameters())
        for fqn, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, theirs[fqn].grad), fqn
            # One string: ranks write into one pipe, and print writes its arguments one by one.
            print(f"<equal {fqn}>", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("name", "schedule"), [("gpt", "1f1b"), ("convnet", "gpipe"),
                                                ("unet", "1f1b"), ("mlp", "gpipe")])  # fmt: skip
def test_gradients(tmp_path: Path, name: str, schedule: str, num_ranks: int) -> None:
    run = processes(GRADIENTS, num_ranks, tmp_path, name, schedule)
    assert run.code == 0, str(run)
    expected = {fqn for fqn, _ in getattr(models, name)().named_parameters()}
    assert set(re.findall(r"<equal (\S+?)>", run.output)) == expected, str(run)


@pytest.mark.slow
def test_a_gpt_with_tied_weights_and_dropout_on_two_ranks(tmp_path: Path) -> None:
    assert_equal(torchrun(TRAIN, 2, tmp_path, "gpt-dropout", "2bw", "0.1", "8,8,3,8,8,8"), 2)


@pytest.mark.slow
def test_the_model_alone_on_two_ranks(tmp_path: Path) -> None:
    run = processes(
        """
        import torch, pdcompile
        from tests.helpers import models
        torch.manual_seed(0)
        model = models.ReturnsLoss(models.mlp())
        x, y = models.batch_for(model.inner, 8, 0)
        pipe = pdcompile.compile(model)
        losses = [float(pipe.step(x, y).loss) for _ in range(3)]
        assert losses[2] < losses[0], losses
        print("alone", losses, flush=True)
        pipe.close()

        inner = models.mlp()
        pipe = pdcompile.compile(inner, loss_fn=models.loss_for(inner))
        losses = [float(pipe.step(x, target=y).loss) for _ in range(3)]
        assert losses[2] < losses[0], losses
        print("with loss", losses, flush=True)
        pipe.close()
        """,
        2,
        tmp_path,
    )
    assert run.code == 0, str(run)
    assert run.output.count("alone") == 2, str(run)
    assert run.output.count("with loss") == 2, str(run)


@pytest.mark.slow
def test_ranks_that_build_different_weights_start_from_those_of_rank_0(tmp_path: Path) -> None:
    run = processes(
        """
        import copy, os, torch, pdcompile
        from tests.helpers import models
        model = models.mlp(seed=int(os.environ["RANK"]))
        twin = copy.deepcopy(model)
        x, y = models.batch_for(model, 8, 0)
        common = dict(loss_fn=models.loss_for(model), microbatches=4)
        pipe = pdcompile.compile(model, costs="estimated", **common)
        losses = [float(pipe.step(x, target=y).loss) for _ in range(3)]
        if 0 in pipe.ranks:
            expected = pdcompile.reference(twin, **common)
            theirs = [float(expected.step(x, target=y).loss) for _ in range(3)]
            print(f"as rank 0 alone: {losses == theirs} {losses} {theirs}", flush=True)
        pipe.close()
        """,
        2,
        tmp_path,
    )
    assert run.code == 0, str(run)
    assert "as rank 0 alone: True" in run.output, str(run)
    assert run.output.count("the ranks built different weights") == 1, str(run)


@pytest.mark.slow
def test_wrong_number_of_processes(tmp_path: Path) -> None:
    run = processes(
        """
        import torch, pdcompile
        from tests.helpers import models
        model = models.mlp()
        x, y = models.batch_for(model, 8, 0)
        try:
            pdcompile.compile(model, loss_fn=models.loss_for(model), stages=3).step(x, target=y)
        except pdcompile.LaunchError as error:
            print("refused:", error, flush=True)
        except pdcompile.RankError as error:
            print("refused:", error, flush=True)
        """,
        2,
        tmp_path,
    )
    assert run.code == 0, str(run)
    assert run.output.count("refused:") == 2, str(run)
    assert "WORLD_SIZE is 2" in run.output, str(run)


def test_an_error_on_one_rank_reaches_the_other_with_its_cause(tmp_path: Path) -> None:
    run = processes(
        """
        import torch, pdcompile
        from tests.helpers import models
        torch.manual_seed(0)
        model = models.mlp()
        x, y = models.batch_for(model, 8, 0)
        pipe = pdcompile.compile(model, loss_fn=models.loss_for(model), microbatches=4)
        pipe.step(x, target=y)
        if 0 in pipe.ranks:
            x = x.double()
        try:
            for _ in range(3):
                float(pipe.step(x, target=y).loss)
        except pdcompile.PdcompileError as error:
            print(f"rank {pipe.ranks}: {type(error).__name__}: {error}", flush=True)
        """,
        2,
        tmp_path,
    )
    assert "rank (0,): InputError" in run.output, str(run)
    assert "rank (1,): RankError" in run.output, str(run)
    assert run.output.count("float64") >= 2, str(run)
