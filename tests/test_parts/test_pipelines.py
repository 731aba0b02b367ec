"""Stages in parts on ranks of their own, beside plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pdcompile
from examples.gpt import GPT, loss_fn
from pdcompile.checkpoint.contents import open_checkpoint
from pdcompile.eager.optimizers import NamedParameters
from pdcompile.errors import ConfigError, LaunchError
from pdcompile.options import Options
from pdcompile.problem.constraints import Constraint, CutBefore, Pin
from tests.helpers.divided import OPTIMIZERS, model_of
from tests.helpers.launch import Run, processes, torchrun

#: what scripts on ranks begin with: what training comes to is compared, so nothing is verified,
#: and any plan will do
COMMON = """
    import copy, json, os, sys
    from functools import partial
    import torch
    import pdcompile
    from examples.gpt import loss_fn
    from tests.helpers.divided import batch_of, model_of, plain_training

    compiled = partial(
        pdcompile.compile, loss_fn=loss_fn, costs="estimated", microbatches=4, verify="off",
        time_limit=0,
    )
    inputs, target = batch_of("gpt")
"""

RANKS = """
    for kwargs in json.loads(sys.argv[1]):
        kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
        name, clip = kwargs.pop("model", "gpt"), kwargs.get("max_grad_norm")
        model, (inputs, target) = model_of(name), batch_of(name)
        plain = copy.deepcopy(model)
        loss = loss_fn if name == "gpt" else None
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        with compiled(model, loss_fn=loss, optimizer=optimizer, **kwargs) as pipe:
            losses = [pipe.step(**inputs, target=target).loss.item() for _ in range(3)]
            pipe.flush()
            state = pipe.full_state_dict()
            if pipe.ranks == (0,):
                lag = kwargs.get("schedule") == "2bw"
                expected, found = plain_training(plain, inputs, target, loss, clip, lag=lag)
                worst = max((state[k] - v).abs().max().item() for k, v in expected.items())
                apart = max(abs(a - b) for a, b in zip(losses, found))
                print(f"AGREE {worst <= 2e-5 and apart <= 2e-5} {worst:.1e} {apart:.1e} {kwargs}")
"""

FAST = [
    {"parts": 2, "stages": 2, "max_grad_norm": 0.5},
    {"parts": 4, "split": "sequence"},
    {"parts": 2, "replicas": 2, "stages": 1, "split": "width+sequence", "recompute": True},
]


def agree(run: Run, count: int) -> None:
    lines = [line for line in run.output.splitlines() if line.startswith("AGREE")]
    assert run.code == 0, run
    assert len(lines) == count, run
    assert all(line.startswith("AGREE True") for line in lines), lines


def test_gpt_on_four_ranks_trains_as_plain_pytorch(tmp_path: Path) -> None:
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(FAST)), len(FAST))


def test_whole_stages_beside_divided_ones_train_as_plain_pytorch(tmp_path: Path) -> None:
    settings = [{"parts": [2, 1], "max_grad_norm": 0.5},
                {"parts": [1, 2], "schedule": "2bw", "split": "sequence"}]  # fmt: skip
    agree(processes(COMMON + RANKS, 3, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[2, 1], [1, 2]])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "2bw", "auto"])
def test_unlike_parts_under_every_schedule(parts: list[int], schedule: str, tmp_path: Path) -> None:
    splits = "width", "width+sequence", "sequence", "context", "samples"
    settings = [{"parts": parts, "schedule": schedule, "split": split} for split in splits]
    agree(processes(COMMON + RANKS, 3, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "llama", "gpt2", "t5", "bert", "vit"])
def test_unlike_parts_of_models_of_hugging_face(model: str, tmp_path: Path) -> None:
    settings = [{"parts": parts, "model": model} for parts in ([2, 1], [1, 2])]
    agree(processes(COMMON + RANKS, 3, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_unlike_parts_of_replicas_and_in_device_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [{"parts": [2, 1], "replicas": 2, "max_grad_norm": 0.5}]
    agree(processes(COMMON + RANKS, 6, tmp_path, json.dumps(settings)), 1)
    monkeypatch.setenv("PDCOMPILE_TRANSPORT", "ordered")
    settings = [{"parts": [1, 2]}, {"parts": [2, 1], "schedule": "2bw"}]
    agree(torchrun(COMMON + RANKS, 3, tmp_path, json.dumps(settings)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "2bw", "interleaved", "zb-v"])
@pytest.mark.parametrize("split", ["width", "sequence", "width+sequence", "context", "samples"])
def test_every_schedule(schedule: str, split: str, tmp_path: Path) -> None:
    stages = 4 if schedule in ("interleaved", "zb-v") else 2
    settings = [{"parts": 2, "stages": stages, "schedule": schedule, "split": split}]
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "llama", "gpt2", "t5", "bert", "vit"])
def test_models_of_hugging_face(model: str, tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"model": model, "parts": 2, "stages": 2},
        {"model": model, "parts": 4},
    ]
    if model not in ("mlp", "vit"):
        settings.append({"model": model, "parts": 2, "stages": 2, "split": "sequence"})
    settings.append({"model": model, "parts": 2, "stages": 2, "split": "samples"})
    agree(processes(COMMON + RANKS, 4, tmp_path, json.dumps(settings)), len(settings))


@pytest.mark.slow
def test_messages_in_device_order_through_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCOMPILE_TRANSPORT", "ordered")
    agree(torchrun(COMMON + RANKS, 4, tmp_path, json.dumps(FAST)), len(FAST))


UNLIKE = """
    rank = int(os.environ["RANK"])
    pipe = compiled(model_of("gpt"), parts=2)
    pipe.step(**inputs, target=target)
    inputs["ids"] = inputs["ids"].roll(rank, 0)
    try:
        pipe.step(**inputs, target=target)
    except pdcompile.errors.PdcompileError as error:
        print(f"rank {rank}: {type(error).__name__}: {error.message}")
"""


def test_parts_with_unlike_inputs_are_refused(tmp_path: Path) -> None:
    run = processes(COMMON + UNLIKE, 2, tmp_path)
    assert "rank 1: ContractError: rank 0 has other values in input 'ids'" in run.output, run
    assert "rank 0: RankError: another rank failed first: rank 1" in run.output, run


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    model, optimizer = state
    moments = {
        f"{name}.{key}": value
        for name, one in optimizer.get("state", {}).items()  # of rank 0
        for key, value in one.items()
        if isinstance(value, torch.Tensor)
    }
    return {**model, **moments}


CHECKPOINTS = """
    from tests.helpers.divided import OPTIMIZERS
    from tests.test_parts.test_pipelines import tensors_of

    folder, settings, before = sys.argv[1], eval(sys.argv[2]), None
    optimizer, which = OPTIMIZERS[sys.argv[3]], sys.argv[4]
    (inputs, target), loss = batch_of(which), loss_fn if which == "gpt" else None
    fixed = {"optimizer": optimizer, "resume": folder, "loss_fn": loss}
    for n, kwargs in enumerate(settings):
        with compiled(model_of(which), **fixed, **kwargs) as pipe:
            pipe.prepare(**inputs, target=target)
            now = tensors_of((pipe.full_state_dict(), pipe.full_optimizer_state_dict()))
            if before is not None and pipe.ranks == (0,):
                assert pipe.position.minibatches == n and now.keys() == before.keys()
                assert all(torch.equal(now[name], before[name]) for name in now)
            pipe.step(**inputs, target=target)
            pipe.save(folder)
            before = tensors_of((pipe.full_state_dict(), pipe.full_optimizer_state_dict()))
            if pipe.ranks == (0,):
                torch.save(before, folder + "/last.pt")
    print("SAVED")
"""


def checkpoints_fit(
    name: str, settings: list[dict[str, Any]], folder: Path, ranks: int = 4, model: str = "gpt"
) -> None:
    """Training goes on from plan to plan, and in the end in plain PyTorch, with the same bits."""
    kept = folder / "checkpoints"
    kept.mkdir()
    run = processes(COMMON + CHECKPOINTS, ranks, folder, str(kept), repr(settings), name, model)
    assert run.code == 0, run
    plain = model_of(model)
    made = OPTIMIZERS[name](NamedParameters(plain.named_parameters()))
    optimizers = made if isinstance(made, list) else [made]
    assert pdcompile.load_checkpoint(kept, plain, optimizers).minibatches == len(settings)
    assert open_checkpoint(kept).manifest.ranks == ranks  # parts count
    last, seen = torch.load(kept / "last.pt"), dict[str, torch.Tensor]()
    for fqn, parameter in plain.named_parameters():
        states = [one.state[parameter] for one in optimizers if parameter in one.state]
        assert bool(states) == (name != "sizes")
        found = {f"{fqn}.{key}": value for one in states for key, value in one.items()}
        seen |= {key: one for key, one in found.items() if isinstance(one, torch.Tensor)}
        seen[fqn] = parameter.detach()
    assert seen.keys() == last.keys() - ({"head.weight"} if model == "gpt" else set())  # tied
    assert all(torch.equal(value, last[name]) for name, value in seen.items())


def test_checkpoints_of_any_plan_fit_any_other_with_states_of_adam(tmp_path: Path) -> None:
    """Plans of parts, of replicas and of updates at homes go on from each other's."""
    at_home = {"updates": "home", "replicas": 2}
    settings = [
        {"parts": 2, "stages": 2}, {**at_home, "stages": 2}, {"parts": 4},
        {"replicas": 2, "stages": 2}, {**at_home, "stages": 1, "parts": 2},
    ]  # fmt: skip
    checkpoints_fit("adamw", settings, tmp_path)


@pytest.mark.parametrize("optimizer", [
    "adamw", pytest.param("muon", marks=pytest.mark.slow)
])  # fmt: skip
def test_checkpoints_of_whole_stages_beside_divided_ones(optimizer: str, tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [{"stages": 3}, {"parts": (2, 1)}, {"parts": (1, 2)}]
    more = settings[:2] if optimizer == "muon" else []
    checkpoints_fit(optimizer, [*settings, *more], tmp_path, 3)


def gpt(**options: Any) -> pdcompile.Pipeline:
    torch.manual_seed(0)
    ids = torch.randint(256, (8, 16))
    return pdcompile.compile(
        GPT(2, 64, 4, 16), ids, example_target=ids, loss_fn=loss_fn, costs="estimated", **options
    )


def test_in_one_process_parts_are_compared_and_stages_run_whole() -> None:
    pipe = gpt(parts=2, stages=2, microbatches=4)
    assert "the stages equal eager up to rounding" in pipe.explain()
    assert "as 2 parts by width they were compared with the model" in pipe.explain()
    assert pipe.plan.training.parts == 1


def test_whole_stages_beside_divided_ones_are_compared(tmp_path: Path) -> None:
    pipe = gpt(parts=(2, 1), microbatches=4)
    assert "the stages equal eager up to rounding" in pipe.explain()
    assert "as 2, 1 parts by width they were compared" in pipe.explain()


class Twice(nn.Module):
    """A layer on both stages, and an output of the first that a later layer reads too."""

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.shared(x).tanh() + x
        return {"loss": self.shared(self.down(self.up(first).relu())).square().mean(), "at": first}


@pytest.mark.sample(3)
@pytest.mark.parametrize("constraint", [Pin("down", 1), CutBefore("down")])
@pytest.mark.parametrize("parts", [(1, 2), (2, 1)])
@pytest.mark.parametrize("split", ["width", "samples"])
def test_the_cut_of_whole_and_divided_stages_is_kept(
    split: str, parts: tuple[int, int], constraint: Constraint
) -> None:
    torch.manual_seed(0)
    pipe = pdcompile.compile(
        Twice(), torch.randn(8, 64), costs="estimated", microbatches=2, parts=parts, split=split,
        constraints=[constraint], optimizer=torch.optim.SGD,
    )  # fmt: skip
    assert "the stages equal eager up to rounding" in pipe.explain()
    assert pipe.plan.stage_of["up"] == 0
    assert "down" not in pipe.plan.stages[0].ops


def test_heads_that_parts_cannot_share_are_told() -> None:
    torch.manual_seed(0)
    ids = torch.randint(256, (8, 16))
    pipe = pdcompile.compile(
        GPT(1, 48, 3, 16), ids, example_target=ids, loss_fn=loss_fn, costs="estimated", parts=2,
        verify="off",
    )  # fmt: skip
    assert "2 parts cannot share the heads of scaled_dot_product_attention (" in pipe.explain()


def test_what_parts_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parts=3: .*heads \(4\) of blocks.0.attention.* do not"):
        gpt(parts=3)
    with pytest.raises(ConfigError, match="split='sequence' divides nothing: a stage has one part"):
        gpt(split="sequence")
    with pytest.raises(ConfigError, match="parts=0 is below 1"):
        gpt(parts=0)
    with pytest.raises(ConfigError, match=r"parts=\(2, 4\) has stages of 2 and of 4 parts"):
        gpt(parts=(2, 4))
    for kwargs, said in (
        ({"replicas": "any"}, "leaves to the planner how many ranks"),
        ({"stages": 3}, "not the number of stages"),
        ({"schedule": "interleaved"}, "has several stages on a rank"),
    ):
        with pytest.raises(ConfigError, match=said):
            gpt(parts=(2, 1), **kwargs)
    with pytest.raises(ConfigError, match=r"parts=\(2, 2\)"):
        gpt(parts=(2, 2), stages=3)
    assert (Options.given({"parts": (2, 2)}).parts, Options.given({"parts": (2, 2)}).stages) == (
        2,
        2,
    )


def test_clusters_that_do_not_divide_are_refused() -> None:
    from pdcompile.cluster import Cluster
    from pdcompile.errors import ClusterError

    cluster = Cluster.parse("2x4")
    grouped = cluster.grouped(2)
    assert [level.size for level in grouped.levels] == [2, 2]
    assert grouped.parts is not None
    assert (len(grouped.devices), grouped.parts.size) == (4, 2)
    assert Cluster.from_toml(grouped.to_toml()) == grouped
    over_hosts = cluster.grouped(8).parts
    assert over_hosts is not None
    assert over_hosts.bytes_per_second == cluster.levels[1].bytes_per_second
    with pytest.raises(ClusterError, match="groups of 3 devices do not divide the 4"):
        cluster.grouped(3)
    unlike = cluster.grouped((4, 2, 1, 1))
    assert (len(unlike.devices), unlike.levels[0].size) == (4, 4)
    assert unlike.levels[0].bytes_per_second == cluster.levels[1].bytes_per_second
    assert unlike.parts is not None
    assert unlike.parts.size == 4
    assert unlike.parts.bytes_per_second == cluster.levels[0].bytes_per_second
    with pytest.raises(ClusterError, match="8 are there, not 3"):
        cluster.grouped((2, 1))
    with pytest.raises(ClusterError, match=r"the cluster has \[parts\]"):
        gpt(cluster=grouped, stages=2)


def test_processes_that_do_not_divide_into_parts_are_refused() -> None:
    from pdcompile.options.configuration import machines

    with pytest.raises(LaunchError, match="stages of 2 parts each, but WORLD_SIZE is 3"):
        machines(Options.given({"parts": 2}), 3)
    with pytest.raises(LaunchError, match="2 stages of 2 parts, but WORLD_SIZE is 6") as caught:
        machines(Options.given({"parts": 2, "stages": 2}), 6)
    with pytest.raises(LaunchError, match=r"parts \(2, 1\) take 3 ranks|take 3 ranks"):
        machines(Options.given({"parts": (2, 1)}), 4)
    assert "--nproc-per-node=4" in str(caught.value)
    with pytest.raises(LaunchError, match="2 stages of 2 parts, but WORLD_SIZE is 3") as caught:
        machines(Options.given({"parts": 2, "stages": 2}), 3)
    assert caught.value.remedy == "launch with torchrun --nproc-per-node=4"


BY_HAND = """
    model, ids = model_of("gpt"), inputs["ids"]
    plain = copy.deepcopy(model)
    with compiled(model, parts=2, stages=2, optimizer=None) as pipe:
        pipe.prepare(ids, target=target)
        ours = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            ours.zero_grad()
            pipe.forward_backward(ids, target=target)
            pipe.forward_backward(ids.flip(0), target=target.flip(0))
            norm = pipe.clip_grad_norm_(0.3)
            ours.step()
        state = pipe.full_state_dict()
        if pipe.ranks == (0,):
            theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
            for _ in range(2):
                theirs.zero_grad()
                for x, y in ((ids, target), (ids.flip(0), target.flip(0))):
                    loss_fn(plain(x), y).backward()
                expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
                theirs.step()
            worst = max((state[k] - v).abs().max().item() for k, v in plain.state_dict().items())
            print(f"AGREE {worst <= 2e-5 and abs(norm - expected) < 1e-4} {worst:.1e}")
"""


@pytest.mark.slow
def test_gradients_of_several_calls_are_summed_once_over_parts(tmp_path: Path) -> None:
    agree(processes(COMMON + BY_HAND, 4, tmp_path), 1)


def test_conversions_that_somebody_edited_are_not_passed_over(tmp_path: Path) -> None:
    from pdcompile.errors import SourceError
    from pdcompile.passes.codegen import read
    from tests.test_parts.test_written import gpt_in_parts

    sources = gpt_in_parts("width").sources
    for name, text in sources.files.items():
        (tmp_path / name).write_text(text)
    assert not read(tmp_path, sources).edited
    (tmp_path / "pdcompile_parts.py").write_text(sources.files["pdcompile_parts.py"] + "# mine\n")
    with pytest.raises(SourceError, match=r"pdcompile_parts\.py is not the one"):
        read(tmp_path, sources)


CHANGED = """
    def weight(model, pipe):
        model.blocks[0].ln_1.weight.data.add_(0.1)

    def rate(model, pipe):
        pipe.optimizer.param_groups[0]["lr"] = 0.5

    def hook(model, pipe):
        model.blocks[0].ln_1.weight.register_hook(lambda gradient: gradient * 0)

    def hook_of_slices(model, pipe):
        model.blocks[0].up.weight.register_hook(lambda gradient: gradient / gradient.norm())

    change, model = locals()[sys.argv[1]], model_of("gpt")
    pipe = compiled(model, parts=2, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    pipe.step(**inputs, target=target)
    try:
        if pipe.ranks == (1,):
            change(model, pipe)
        for _ in range(2):
            pipe.step(**inputs, target=target)
    except pdcompile.errors.PdcompileError as error:
        print(f"{type(error).__name__} at {error.where}: {error.message}")
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("weight", "ContractError at blocks.0.ln_1.weight: this part of a stage holds other"),
        ("rate", "ContractError at the optimizer's param_groups: this part of a stage holds other"),
        pytest.param("hook", "blocks.0.ln_1.weight: this part", marks=pytest.mark.slow),
        ("hook_of_slices", "of which each of 2 parts has a slice"),
    ],
)
def test_what_one_part_changes_alone_is_refused(change: str, said: str, tmp_path: Path) -> None:
    run = processes(COMMON + CHANGED, 2, tmp_path, change)
    assert said in run.output, run


def test_hooks_on_gradients_that_are_divided_are_refused_before_verify() -> None:
    torch.manual_seed(0)
    model, ids = GPT(2, 64, 4, 16), torch.randint(256, (8, 16))
    model.blocks[0].ln_1.weight.register_hook(lambda gradient: gradient * 0.5)

    def compiled() -> pdcompile.Pipeline:
        return pdcompile.compile(
            model, ids, example_target=ids, loss_fn=loss_fn, costs="estimated", parts=2
        )

    assert compiled().plan.training.parts == 1  # a hook on what is whole runs on all parts
    model.blocks[0].attention.qkv.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(ConfigError, match="each of 2 parts has a slice") as caught:
        compiled()
    assert caught.value.where == "blocks.0.attention.qkv.weight"


def test_a_gradient_that_is_rounding_alone_is_no_difference() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(  # batch norm takes the convolution's bias away
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, groups=4), torch.nn.BatchNorm2d(16), torch.nn.Flatten(),
        torch.nn.Linear(256, 16),
    )  # fmt: skip
    pipe = pdcompile.compile(
        model, torch.randn(8, 3, 8, 8), example_target=torch.randn(8, 16), parts=2,
        loss_fn=torch.nn.functional.mse_loss, costs="estimated",
    )  # fmt: skip
    assert "the stages equal eager up to rounding" in pipe.explain()


class _Sparse(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(48, 32, sparse=True)
        self.out = torch.nn.Linear(32, 48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids).relu())  # type: ignore[no-any-return]


def test_parts_with_sparse_gradients_are_compared() -> None:
    torch.manual_seed(0)
    ids = torch.randint(48, (8, 12))
    pipe = pdcompile.compile(
        _Sparse(), ids, example_target=ids, loss_fn=loss_fn, costs="estimated", parts=2
    )
    assert "the stages equal eager up to rounding" in pipe.explain()
