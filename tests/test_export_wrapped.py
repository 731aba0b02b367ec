"""Generated stages are ordinary modules: torch.compile, fully_shard and DDP work on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pdcompile import driver
from pdcompile.batch import example_call
from pdcompile.cluster import Cluster
from pdcompile.options import Options
from pdcompile.problem.constraints import CutAt
from tests.helpers import exported, launch

pytestmark = pytest.mark.slow


def stages() -> tuple[list[nn.Module], Tensor]:
    """The two stages of the GPT with its weights, tied ones of the last stage on their own; and
    an input."""
    workload = exported.gpt()
    inputs, target = workload.example()
    flat = example_call(workload.model, inputs, target)
    options = Options(
        loss_fn=workload.loss_fn, cluster=Cluster.local(2), costs="estimated", verify="off",
        progress=False, microbatches=1, constraints=[CutAt("blocks.*")],  # whole blocks are wrapped
    )  # fmt: skip
    state = workload.model.state_dict()
    found = []
    for cls in driver.build(workload.model, flat, options).stage_classes:
        stage = cls()
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
        found.append(stage.eval())  # no dropout; what gradients are does not change
    return found, inputs


def run(parts: list[nn.Module], value: Tensor) -> Tensor:
    """All stages one after the other; the gradients of a loss are left in the parameters."""
    passed: tuple[Tensor, ...] = (value,)
    for part in parts:
        passed = part(*passed)
    loss = passed[0].square().mean()
    loss.backward()
    return loss.detach()


def gradients(parts: list[nn.Module]) -> list[Tensor]:
    found = [p.grad for part in parts for p in part.parameters()]
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_stage_can_be_compiled_whole(backend: str) -> None:
    parts, value = stages()
    expected = run(parts, value)
    known = [gradient.clone() for gradient in gradients(parts)]
    again, _ = stages()
    compiled = [torch.compile(part, backend=backend, fullgraph=True) for part in again]
    torch.testing.assert_close(run(compiled, value), expected)  # type: ignore[arg-type]
    found = gradients(again)
    assert len(found) == len(known)
    for one, other in zip(found, known, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


WRAPPED = """
    import os
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from tests.test_export_wrapped import gradients, run, stages

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parts, value = stages()
    expected = run(parts, value)
    known = [gradient.clone() for gradient in gradients(parts)]

    mine = value.chunk(size)[rank]  # each rank has its share of the samples
    wrapped, _ = stages()
    if "WRAPPER" == "ddp":
        wrapped = [DistributedDataParallel(part) for part in wrapped]
    else:
        for part in wrapped:
            for path, module in part.named_modules():
                if path.rpartition(".")[2].isdecimal():  # each block apart, then the rest
                    fully_shard(module)
            fully_shard(part)
    loss = run(wrapped, mine)
    dist.all_reduce(loss)
    torch.testing.assert_close(loss / size, expected)
    found = gradients(wrapped)
    assert len(found) == len(known)
    for one, other in zip(found, known, strict=True):
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    print("equal on rank", rank)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_stage_can_have_data_parallel_replicas(wrapper: str, tmp_path: Path) -> None:
    """Two ranks of one stage each: gradients are the mean over both, as one process has them."""
    done = launch.processes(WRAPPED.replace("WRAPPER", wrapper), 2, tmp_path)
    assert done.code == 0, done
    assert done.output.count("equal on rank") == 2
