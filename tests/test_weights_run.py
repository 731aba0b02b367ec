"""Models on the meta device that run: every process gives values to its own stage alone."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompile
from pdcompile import Cluster, CutBefore
from pdcompile.errors import ConfigError
from tests.helpers.launch import ROOT, processes
from tests.helpers.llama import batch, llama, on_meta

TRAIN: dict[str, Any] = {
    "optimizer": partial(torch.optim.AdamW, lr=1e-2),
    "microbatches": 2,
    "max_grad_norm": 1.0,
}


def pipeline(model: nn.Module, **more: Any) -> Any:
    return pdcompile.compile(
        model, costs="estimated", cluster=Cluster.local(2), time_limit=0,
        constraints=[CutBefore("model.layers.1")], **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tie", [pytest.param(False, marks=pytest.mark.slow), True])
def test_in_one_process_it_trains_as_the_model_that_was_saved(tmp_path: Path, tie: bool) -> None:
    eager = llama(tie=tie)
    eager.save_pretrained(tmp_path)
    pipe = pipeline(on_meta(tie=tie), weights=tmp_path, **TRAIN)
    pipe.prepare(**batch(0))
    reference = pdcompile.reference(eager, plan=pipe.plan, **TRAIN)
    for seed in range(2):
        call = batch(seed)
        assert float(pipe.step(**call).loss) == float(reference.step(**call).loss)
    found, expected = pipe.full_state_dict(), reference.full_state_dict()
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_the_reference_takes_the_same_source(tmp_path: Path) -> None:
    eager = llama()
    eager.save_pretrained(tmp_path)
    one = pdcompile.reference(on_meta(), weights=tmp_path, **TRAIN)
    other = pdcompile.reference(eager, **TRAIN)
    assert float(one.step(**batch(0)).loss) == float(other.step(**batch(0)).loss)


@pytest.mark.slow
def test_a_kept_model_stays_without_memory(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = on_meta()
    with pipeline(model, weights=tmp_path, keep_model=True, **TRAIN) as pipe:
        pipe.step(**batch(0))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_does_not_fit_is_refused_before_planning(tmp_path: Path) -> None:
    llama(layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"missing in the checkpoint: model\.layers\.1\."):
        pdcompile.compile(on_meta(), weights=tmp_path)
    with pytest.raises(ConfigError, match="there is no such file"):
        pdcompile.compile(on_meta(), weights=tmp_path / "no.safetensors")


def test_without_a_source_the_remedy_names_it() -> None:
    model = nn.Linear(8, 8, device="meta")
    pipe = pdcompile.compile(model, costs="estimated", loss_fn=nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="no values, they are on the meta device") as caught:
        pipe.step(torch.ones(4, 8), target=torch.ones(4, 8))
    assert "weights=" in (caught.value.remedy or "")


class Holds(nn.Module):
    """A tensor that is neither parameter nor buffer, and so has no name to give it a value by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.scale = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale).mean()


def test_a_tensor_that_has_no_name_is_refused_by_its_place() -> None:
    def fill(name: str, tensor: Tensor) -> None:
        tensor.zero_()

    with torch.device("meta"):
        model = Holds()
    pipe = pdcompile.compile(model, costs="estimated", weights=fill, optimizer=None)
    with pytest.raises(ConfigError, match="scale"):
        pipe.step(torch.ones(2, 4))


# Each line begins anew: a progress bar of the other rank may have left one open.
RANKS = """
    import sys
    from functools import partial
    import torch
    import pdcompile
    from pdcompile import CutBefore
    from tests.helpers.llama import batch, llama, on_meta

    folder, tie = sys.argv[1], sys.argv[2] == "tied"
    common = dict(optimizer=None, microbatches=2)
    model = on_meta(tie=tie)
    read = []
    import pdcompile.weights.tensor_files as tensor_files
    plain = tensor_files.TensorFiles.tensor
    def noted(self, name, like):
        read.append(name)
        return plain(self, name, like)
    tensor_files.TensorFiles.tensor = noted
    pipe = pdcompile.compile(
        model, costs="estimated", time_limit=0, weights=folder,
        constraints=[CutBefore("model.layers.1")], **common,
    )
    losses = [float(pipe.forward_backward(**batch(seed)).loss) for seed in range(2)]
    mine = [name for name, p in model.named_parameters() if not p.is_meta]
    owned = dict(pipe.named_parameters())
    print(f"\\nrank {pipe.ranks[0]} holds {' '.join(mine)}", flush=True)
    print(f"\\nrank {pipe.ranks[0]} read {' '.join(sorted(read))}", flush=True)
    reference = pdcompile.reference(llama(tie=tie), plan=pipe.plan, **common)
    theirs = [float(reference.forward_backward(**batch(seed)).loss) for seed in range(2)]
    wanted = dict(reference.named_parameters())
    unequal = [n for n, p in owned.items() if not torch.equal(p.grad, wanted[n].grad)]
    print(f"\\nrank {pipe.ranks[0]}: losses {losses == theirs}, {len(owned)} gradients, "
          f"unequal {unequal}", flush=True)
    pipe.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_each_rank_reads_its_own_stage_and_no_more(tmp_path: Path, tie: bool) -> None:
    folder = tmp_path / "saved"
    llama(tie=tie).save_pretrained(folder, max_shard_size="20KB")
    run = processes(RANKS, 2, tmp_path, str(folder), "tied" if tie else "apart")
    assert run.code == 0, run
    lines = [line for line in run.output.splitlines() if line.startswith("rank ")]
    named = {tuple(line.split()[1:3]): set(line.split()[3:]) for line in lines if ":" not in line}
    of_layers = [
        {n for n in named[str(r), "holds"] if n.startswith(f"model.layers.{1 - r}.")}
        for r in (0, 1)
    ]
    assert of_layers == [set(), set()], "a rank holds the layer of the other"
    every = {name for name, _ in llama(tie=tie).named_parameters()}
    assert named["0", "holds"] | named["1", "holds"] == every
    shared = {"model.embed_tokens.weight"} if tie else set()
    assert named["0", "holds"] & named["1", "holds"] == shared
    for rank in "01":
        assert named[rank, "read"] == named[rank, "holds"]
    results = [line for line in lines if ":" in line]
    assert len(results) == 2
    assert all("losses True" in line and "unequal []" in line for line in results), run


@pytest.mark.slow
def test_the_example_runs_from_its_function_under_torchrun(tmp_path: Path) -> None:
    script = f"""
        import sys
        from pdcompile.__main__ import main
        sys.argv = ["pdcompile", "run", "{ROOT}/examples/llama.py:build_tiny", "--costs",
                    "estimated", "--time-limit", "2", "--steps", "2", "--every", "1"]
        main()
    """
    run = processes(script, 2, tmp_path)
    assert run.code == 0, run
    ranks = [line for line in run.output.splitlines() if line.startswith("step ")]
    assert len(ranks) == 2
    one = pdcompile.load_target(f"{ROOT}/examples/llama.py:build_tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = pdcompile.compile(
            one.model, costs="estimated", weights=one.weights, microbatches=8, verify="off"
        )
    losses = [float(pipe.step(**one.example_inputs).loss) for _ in range(2)]
    assert [line.split()[-1] for line in ranks] == [f"{loss:.6f}" for loss in losses]
