"""The few lines that other runtimes take: torchtitan, Megatron-LM, Accelerate.

Each follows what the project's own code reads (looked up in November 2026):

- torchtitan, ``torchtitan/distributed/pipeline_parallel.py``: of the model's children those in a
  stage's list stay, of a ModuleList or ModuleDict the entries in it, all others become None; each
  stage has a copy of the model, so that tied weights come apart, and runs its whole forward.
- Megatron-LM, ``megatron/core/transformer/pipeline_parallel_layer_layout.py``: ``E`` embedding,
  ``t`` transformer layer, ``L`` loss with what comes before it, ``|`` between stages, ``t*3`` for
  ``ttt``; stage s is virtual stage s div P of rank s mod P.
- Accelerate, ``accelerate/utils/modeling.py``: a device for each module by name, which holds for
  all below it; every tensor of ``state_dict()`` needs one; tied weights should share theirs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pdcompile.batch import FlatCall
from pdcompile.eager.modes import in_mode
from pdcompile.eager.randomness import preserved_rng
from pdcompile.passes.export import Exported, Refusal, Subject
from pdcompile.passes.export.model_parts import (
    is_numbered,
    part_at,
    parts_of_ops,
    runs_of_parts,
    stages_of_parts,
    whole_parts,
)
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.plan import Plan


def torchtitan(subject: Subject) -> Exported:
    """``parallelism.toml``: the names of the modules of each stage."""
    plan, training, replicas = subject.plan, subject.plan.training, subject.plan.stages[0].replicas
    rows = "".join(f"    {json.dumps(names)},\n" for names in _names_by_stage(subject))
    text = (
        "[parallelism]\n"
        f"pipeline_parallel_degree = {_places(plan)}\n"
        f'pipeline_parallel_schedule = "{training.kind.in_torch}"\n'
        f"pipeline_parallel_microbatch_size = {_samples(plan)}  # samples\n"
        f"data_parallel_shard_degree = {replicas}\n"
        f"module_fqns_per_model_part = [\n{rows}]\n\n"
        "[training]\n"
        f"local_batch_size = {training.batch_size // replicas}  # samples of each data rank\n"
    )
    notes = [
        "parallelism.toml: for a torchtitan config file, or as arguments such as "
        "--parallelism.pipeline_parallel_degree",
        *_left_out(plan, "torchtitan"),
    ]
    if any(parameter.is_meta for parameter in subject.model.parameters()):
        notes.append(
            "not tried: whether the model's forward is right where modules of others are None"
        )
    return {"parallelism.toml": text}, notes


def unlike_torchtitan(subject: Subject) -> Iterator[Refusal]:
    """A tied weight on two stages, or another model without the modules of other stages."""
    for one in subject.plan.tied:
        message = f"weight {one.fqn!r} is tied over stages {', '.join(map(str, one.stages))}, and "
        remedy = "--to torch-pipelining sums its gradients; or untie it in the model, or plan with "
        yield (
            f"{message}torchtitan copies the model for each stage, where they come apart",
            f"{remedy}Together for its holders",
        )
    if any(parameter.is_meta for parameter in subject.model.parameters()):
        return
    for message in unlike_pruned(subject.model, subject.call, _names_by_stage(subject)):
        yield (
            "torchtitan runs the model's whole forward on every stage, of whose children and "
            "entries of their ModuleList or ModuleDict all but the stage's are None: " + message,
            "--to torch-pipelining; or give the model's class its layers directly, and have "
            "forward do nothing beside them, pass by those that are None, and hand on one value",
        )


def unlike_pruned(
    model: nn.Module, call: FlatCall, stages: Sequence[Collection[str]]
) -> Iterator[str]:
    """Differences of the stages, run one after the other, from the model on the example: one fails
    without the modules of the others, or the results differ."""
    leaves = dict(call.leaves)
    with torch.no_grad(), preserved_rng(), in_mode(model, False):
        args, kwargs, _ = call.unflatten(leaves)
        expected = model(*args, **kwargs)
        for k, names in enumerate(stages):
            args, kwargs, _ = call.unflatten(leaves)
            try:
                value = pruned(model, names)(*args, **kwargs)
            except Exception as error:
                kind = type(error).__name__
                yield f"without the modules of others, stage {k} raised {kind}: {error}"
                return
            leaves[next(iter(leaves))] = value  # the first input of the next one
    try:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    except (AssertionError, TypeError):
        yield "its stages, one after the other, do not compute what the model does"


def _names_by_stage(subject: Subject) -> list[list[str]]:
    """The parts that each stage has."""
    placed = stages_of_parts(subject.capture.train, subject.plan)
    stages = range(len(subject.plan.stages))
    return [[path for path, on in placed.items() if k in on] for k in stages]


def pruned(model: nn.Module, names: Collection[str]) -> nn.Module:
    """The model with those of its children, and entries of their lists and dicts, that are named.
    Tensors and modules are those of the model."""
    found = copy.copy(model)
    found._modules = dict(model._modules)  # one that is there twice stays under its second name
    for name, child in model.named_children():
        kept: nn.Module | None = child if name in names else None
        if isinstance(child, nn.ModuleDict):
            kept = nn.ModuleDict({n: one for n, one in child.items() if f"{name}.{n}" in names})
        elif isinstance(child, nn.ModuleList):
            kept = nn.ModuleList(one for i, one in enumerate(child) if f"{name}.{i}" in names)
        found._modules[name] = kept
    return found


def megatron(subject: Subject) -> Exported:
    """``arguments.txt``: the options of Megatron's command line, one a line."""
    plan, placed = subject.plan, whole_parts(subject.capture.train, subject.plan)
    numbered = [path for path in placed if is_numbered(path)]
    counts = [sum(placed[path] == k for path in numbered) for k in range(len(plan.stages))]
    rows = "|".join("t" * count if count < 4 else f"t*{count}" for count in counts)
    tied = bool(_tied(subject.model))
    lines = [
        f"--pipeline-model-parallel-size {_places(plan)}",
        f"--pipeline-model-parallel-layout E{rows}L",
        f"--num-layers {len(numbered)}",
        f"--micro-batch-size {_samples(plan)}",
        f"--global-batch-size {plan.training.batch_size}",
        *([] if tied else ["--untie-embeddings-and-output-weights"]),
    ]
    notes = (
        "arguments.txt: for pretrain_gpt.py: $(cat arguments.txt) with your other options; typed "
        "into a shell the layout needs quotes around it",
        "E is the embedding, t a transformer layer, L the head with the loss, each whatever stands "
        "there in this model; Megatron builds its own model of so many layers",
        *(["Megatron sums the gradients of the tied embedding over both of its stages"] * tied),
        *_left_out(plan, "megatron"),
    )
    return {"arguments.txt": "\n".join(lines) + "\n"}, notes


def unlike_megatrons(subject: Subject) -> Iterator[Refusal]:
    """Differences of the model from a list of blocks between an embedding and a head."""
    placed = whole_parts(subject.capture.train, subject.plan)
    numbered = [path for path in placed if is_numbered(path)]
    otherwise = "--to torch-pipelining takes any model"
    lists = {path.rpartition(".")[0] for path in numbered}
    if len(lists) != 1:
        shown = ", ".join(map(repr, sorted(lists))) or "none"
        message = f"the model has blocks in {len(lists)} containers ({shown}), and Megatron's "
        yield message + "layout speaks of one list of transformer layers", otherwise
    order, runs = list(placed), runs_of_parts(subject.capture.train)
    begin, end = order.index(numbered[0]), order.index(numbered[-1])
    for n, path in enumerate(order):
        if runs[path] > 1:
            message = f"{path!r} runs {runs[path]} times in a forward, and Megatron runs each once"
            yield message, otherwise
        if begin <= n <= end and path not in numbered:
            message = f"{path!r} runs between the layers, and Megatron's layout has none but these "
            yield message + "there", otherwise
        what, stage = ("embedding", 0) if n < begin else ("head", len(subject.plan.stages) - 1)
        if not begin <= n <= end and placed[path] != stage:
            message = f"{path!r}, of the {what}, is on stage {placed[path]}, and Megatron has all "
            yield f"{message}of that on stage {stage}", f"--pin {path}={stage} when you plan"
    for canonical, names in _tied(subject.model).items():
        parts = [_holder(name, placed) or name for name in names]
        at = sorted(order.index(path) if path in order else len(order) for path in parts)
        if not (len(at) == 2 and at[0] < begin and at[1] > end):
            message = f"{canonical!r} is the weight of {' and '.join(map(repr, parts))}, and "
            yield message + "Megatron ties nothing but embedding and head", otherwise


def names_of_tensors(model: nn.Module) -> dict[str, list[str]]:
    """All names in ``state_dict()`` of each parameter and buffer, by the first of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):  # not extra state
            names.setdefault(id(tensor), []).append(name)
    return {own[0]: own for own in names.values()}


def _tied(model: nn.Module) -> dict[str, list[str]]:
    return {first: names for first, names in names_of_tensors(model).items() if len(names) > 1}


def accelerate(subject: Subject) -> Exported:
    """``device_map.json``: the device of each module.

    What runs on stage s is on device s.  A module with a tied weight is where the first holder of
    it is, whatever its stage: it then sends its result on from there.

    Raises:
        ConfigError: a module runs on several stages.
    """
    devices, notes = _device_map(subject)
    notes.append(
        "device_map.json: accelerate.dispatch_model(model, device_map), or device_map= of "
        "from_pretrained; it runs one device after the other, and does not pipeline"
    )
    return {"device_map.json": json.dumps(devices, indent=1) + "\n"}, notes


def _device_map(subject: Subject) -> tuple[dict[str, int], list[str]]:
    """Devices of modules, so that every tensor has one, and what was decided for that."""
    plan, graph = subject.plan, subject.capture.train
    rank_of = [own[0] for own in plan.ranks]
    devices = {path: rank_of[stage] for path, stage in whole_parts(graph, plan).items()}
    read = {
        fqn: rank_of[plan.stage_of[op.name]]
        for op in reversed(graph.ops)
        for fqn in op.used_tensors
        if op.name in plan.stage_of
    }
    return devices, list(_with_tensors(devices, names_of_tensors(subject.model), read))


def unlike_accelerate(subject: Subject) -> Iterator[Refusal]:
    """Ops between modules that read two devices, as the sum of a shortcut: Accelerate moves what a
    module is given, and nothing else."""
    graph, (devices, _) = subject.capture.train, _device_map(subject)
    part_of, main = parts_of_ops(graph), min(devices.values())
    # A loss in the model moves class labels to its device itself.
    at = {
        entry.name: set[int]() if graph.values[entry.name].dtype == "int64" else {main}
        for entry in graph.inputs
    }
    for op in graph.ops:
        read = {name: at[name] for name in op.inputs}
        read |= {fqn: {devices[part]} for fqn in op.used_tensors if (part := _holder(fqn, devices))}
        on = set[int]().union(*read.values())
        if (part := part_of[op.name]) in devices:
            on = {devices[part]}
        elif len(on) > 1 and op.region == "forward":
            shown = " and ".join(f"{name!r} of device {min(d)}" for name, d in read.items() if d)
            yield (
                f"{op.target} at {op.source} runs between modules and reads {shown}: Accelerate "
                "moves what a module is given, and nothing else",
                "--to torch-pipelining; or run it in a module with what it sums, which is then "
                "placed whole",
            )
        at[op.name] = on


def _with_tensors(
    devices: dict[str, int], tensors: Mapping[str, Sequence[str]], read: Mapping[str, int]
) -> Iterator[str]:
    """Gives every tensor a device, and tied ones the same: that of what runs first with it.  Yields
    what was decided.

    Args:
        tensors: as `names_of_tensors`.
        read: the device of the first op that reads each tensor, by its first name.
    """
    order, last = list(devices), list(devices.values())[-1]
    around = frozenset(above for path in order for above in ancestors(path)[:-1])
    for canonical, names in tensors.items():
        parts = [
            _holder(name, devices) or part_at(name.rpartition(".")[0], around) or name
            for name in names
        ]
        home = next((path for path in order if path in parts), parts[0])
        device = devices.setdefault(home, read.get(canonical, last))
        for part in parts:
            if part not in devices:
                yield f"{part} does not run in training: device {device}"
            elif devices[part] != device:
                yield (
                    f"{part} is on device {device} with {home}, and not on {devices[part]}: they "
                    f"share {canonical}"
                )
            devices[part] = device


def _left_out(plan: Plan, to: str) -> Iterator[str]:
    """A note on what of the plan is set elsewhere, and changes what it computes or needs."""
    training, found = plan.training, list[str]()
    if again := [str(stage.index) for stage in plan.stages if stage.recompute]:
        found.append(f"recomputation of stage{'s' * (len(again) > 1)} {', '.join(again)}")
    if training.max_grad_norm:
        found.append(f"clipping at {training.max_grad_norm:g}")
    if training.autocast:
        found.append(f"autocast {training.autocast}")
    if training.loss_reduction != "mean":
        found.append(f"loss_reduction {training.loss_reduction!r}")
    if found:
        yield (
            f"set in {to} yourself what the plan reckons with: {', '.join(found)}; memory, times "
            "and gradients are others without"
        )


def _places(plan: Plan) -> int:
    """Pipeline ranks, replicas left out."""
    return len({own[0] for own in plan.ranks})


def _samples(plan: Plan) -> int:
    """Samples of a microbatch, which are all of one size."""
    return plan.training.batch_size // plan.training.num_microbatches


def _holder(name: str, parts: Mapping[str, object]) -> str | None:
    """The part that a tensor or module is in."""
    return next((path for path in reversed(ancestors(name)) if path in parts), None)
