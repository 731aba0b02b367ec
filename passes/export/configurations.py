"""The few lines that other runtimes take: torchtitan, Megatron-LM, Accelerate; DeepSpeed's parts.

Each follows what the project's own code reads (looked up in November 2026):

- torchtitan, ``torchtitan/distributed/pipeline_parallel.py``: of the model's children those in a
  stage's list stay, of a ModuleList or ModuleDict the entries in it, all others become None; each
  stage has a copy of the model, so that tied weights come apart.
- Megatron-LM, ``megatron/core/transformer/pipeline_parallel_layer_layout.py``: ``E`` embedding,
  ``t`` transformer layer, ``L`` loss with what comes before it, ``|`` between stages, ``t*3`` for
  ``ttt``; stage s is virtual stage s div P of rank s mod P.
- Accelerate, ``accelerate/utils/modeling.py``: a device for each module by name, which holds for
  all below it; every tensor of ``state_dict()`` needs one; tied weights should share theirs.
- DeepSpeed, ``deepspeed/runtime/pipe/module.py``: stage s runs layers ``parts[s]`` up to, and not
  with, ``parts[s + 1]`` of the list that PipelineModule is made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn

from pdcompile.errors import ConfigError
from pdcompile.passes.export.model_parts import (
    is_list,
    is_numbered,
    part_at,
    runs_of_parts,
    spread_parts,
    whole_parts,
)
from pdcompile.passes.export.pruned_model import check_pruned
from pdcompile.passes.export.subject import Exported, Subject
from pdcompile.passes.form.module_tree import ancestors
from pdcompile.plan import Plan, TiedParameter
from pdcompile.plan.schema import ranks_of
from pdcompile.schedule.registry import kind_of

APART = "copies the model for each stage, where they come apart"
LISTS = ("torch.nn.ModuleList", "torch.nn.ModuleDict")


def torchtitan(subject: Subject) -> Exported:
    """``parallelism.toml``: the names of the modules of each stage.

    Raises:
        ConfigError: a module lies deeper than torchtitan looks, a tied weight is on two stages,
            more than one value crosses a boundary, the schedule is none of torch's, or the model
            is another one without the modules of other stages.
    """
    plan, to = subject.plan, "torchtitan"
    placed = whole_parts(subject.capture.train, plan)
    replicas = _equal_replicas(plan, to)
    _refuse_tied(plan.tied, to, APART)
    _refuse_more_values(plan, to)
    classes = subject.capture.train.classes
    for path in placed:
        parent = path.rpartition(".")[0]
        if parent and ("." in parent or classes.get(parent, ("",))[0] not in LISTS):
            raise ConfigError(
                f"module {path!r} is neither a child of the model nor an entry of a ModuleList or "
                "ModuleDict among these, and torchtitan keeps or deletes nothing else",
                where=f"--to {to}",
                remedy="--to torch-pipelining; or give the model's class its layers directly",
            )
    on = {p: (s,) for p, s in placed.items()} | spread_parts(subject.capture.train, plan)
    stages = [[p for p, held in on.items() if k in held] for k in range(len(plan.stages))]
    training = plan.training
    rows = "".join(f"    {json.dumps(names)},\n" for names in stages)
    text = (
        "[parallelism]\n"
        f"pipeline_parallel_degree = {_places(plan)}\n"
        f'pipeline_parallel_schedule = "{kind_of(training.schedule).in_torch}"\n'
        f"pipeline_parallel_microbatch_size = {_samples(plan, replicas)}  # samples\n"
        f"data_parallel_shard_degree = {replicas}\n"
        f"module_fqns_per_model_part = [\n{rows}]\n\n"
        "[training]\n"
        f"local_batch_size = {training.batch_size // replicas}  # samples of each data rank\n"
    )
    notes = [
        "parallelism.toml: for a torchtitan config file, or as arguments such as "
        "--parallelism.pipeline_parallel_degree",
        *_left_out(plan, to),
        *_deepspeed(subject, placed),
    ]
    if any(parameter.is_meta for parameter in subject.model.parameters()):
        notes.append(
            "not tried: whether the model's forward is right where modules of others are None"
        )
    else:
        check_pruned(subject.model, subject.call, stages)
    return Exported({"parallelism.toml": text}, tuple(notes))


def without_lines(to: str) -> Callable[[Plan], Iterator[ConfigError]]:
    """The errors of plans which alone tell that a target has no such lines."""

    def refused(plan: Plan) -> Iterator[ConfigError]:
        try:
            replicas = _equal_replicas(plan, to)
            if to != "accelerate":
                _samples(plan, replicas)
        except ConfigError as error:
            yield error

    return refused


def refuse_tied_ends(plan: Plan, model: nn.Module) -> None:
    """Raise ConfigError where torchtitan would tear a weight apart, wherever cuts are: it is that
    of the model's first and last module, which run on the first and the last stage."""
    own = [set(map(id, one.parameters(recurse=False))) for one in model.modules()]
    holders = [one for one in own if one]
    ends = {0, len(plan.stages) - 1}
    if len(ends) == 2 and holders and holders[0] & holders[-1]:
        at_ends = [one for one in plan.tied if ends <= set(one.stages)]
        _refuse_tied(at_ends, "torchtitan", APART)


def megatron(subject: Subject) -> Exported:
    """``arguments.txt``: the options of Megatron's command line, one a line.

    Raises:
        ConfigError: the model is no list of blocks between an embedding and a head, or the
            schedule is not Megatron's.
    """
    plan, to = subject.plan, "megatron"
    placed = whole_parts(subject.capture.train, plan)
    replicas = _equal_replicas(plan, to)
    _refuse_more_values(plan, to)
    layout, layers = _layout(plan, placed)
    _refuse_several_calls(subject, placed)
    tied = _tied_ends(subject, placed)
    training = plan.training
    lines = [
        f"--pipeline-model-parallel-size {_places(plan)}",
        f"--pipeline-model-parallel-layout {layout}",
        f"--num-layers {layers}",
        f"--micro-batch-size {_samples(plan, replicas)}",
        f"--global-batch-size {training.batch_size}",
        *([] if tied else ["--untie-embeddings-and-output-weights"]),
    ]
    notes = (
        "arguments.txt: for pretrain_gpt.py: $(cat arguments.txt) with your other options; typed "
        "into a shell the layout needs quotes around it",
        "E is the embedding, t a transformer layer, L the head with the loss, each whatever stands "
        "there in this model; Megatron builds its own model of so many layers",
        *(["Megatron sums the gradients of the tied embedding over both of its stages"] * tied),
    )
    text = "\n".join(lines) + "\n"
    notes = (*notes, *_left_out(plan, to), *_deepspeed(subject, placed))
    return Exported({"arguments.txt": text}, notes)


def accelerate(subject: Subject) -> Exported:
    """``device_map.json``: the device of each module.

    What runs on stage s is on device s.  A module with a tied weight is where the first holder of
    it is, whatever its stage: it then sends its result on from there.

    Raises:
        ConfigError: a module runs on several stages.
    """
    plan = subject.plan
    placed = whole_parts(subject.capture.train, plan)
    rank_of = [own[0] for own in ranks_of(plan.stages)]
    _equal_replicas(plan, "accelerate")
    devices = {path: rank_of[stage] for path, stage in placed.items()}
    stage_of = {name: stage.index for stage in plan.stages for name in stage.ops}
    read = {
        fqn: rank_of[stage_of[op.name]]
        for op in reversed(subject.capture.train.ops)
        for fqn in op.used_tensors
        if op.name in stage_of
    }
    notes = list(_with_tensors(devices, subject.tensors, read))
    blocks = sorted(_block_classes(subject, placed))
    notes.append(
        "device_map.json: accelerate.dispatch_model(model, device_map), or device_map= of "
        "from_pretrained; it runs one device after the other, and does not pipeline"
    )
    if blocks:
        notes.append(f"no_split_module_classes = {blocks}")
    text = json.dumps(devices, indent=1) + "\n"
    return Exported({"device_map.json": text}, (*notes, *_deepspeed(subject, placed)))


def _with_tensors(
    devices: dict[str, int], tensors: Mapping[str, str], read: Mapping[str, int]
) -> Iterator[str]:
    """Gives every tensor a device, and tied ones the same: that of what runs first with it.  Yields
    what was decided.

    Args:
        read: the device of the first op that reads each tensor, by its canonical name.
    """
    order, holders = list(devices), dict[str, list[str]]()
    for name, canonical in tensors.items():
        part = _holder(name, devices) or part_at(name.rpartition(".")[0], _around(order)) or name
        holders.setdefault(canonical, []).append(part)
    last = list(devices.values())[-1]
    for canonical, parts in holders.items():
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


def _deepspeed(subject: Subject, placed: Mapping[str, int]) -> Iterator[str]:
    """A note on DeepSpeed, where the model is a list of layers, of which each rank has one row."""
    stages, count = list(placed.values()), len(subject.plan.stages)
    names = list(placed)
    one_each = subject.plan.num_ranks == sum(stage.replicas for stage in subject.plan.stages)
    if stages != sorted(stages) or not (one_each and is_list(subject.capture.train, names)):
        return
    parts = [sum(stage < k for stage in stages) for k in range(count + 1)]
    shown = ", ".join(names if len(names) <= 4 else [*names[:3], "…", names[-1]])
    yield (
        f"DeepSpeed: parts = {parts}, where a PipelineModule has the {len(names)} layers {shown}; "
        "its partition_method knows no list: set self.parts in your own _partition_layers"
    )
    if subject.plan.tied:
        held = ", ".join(one.fqn for one in subject.plan.tied)
        yield f"DeepSpeed: TiedLayerSpec for the layers that share {held}"


def _layout(plan: Plan, placed: Mapping[str, int]) -> tuple[str, int]:
    """Megatron's layout, and how many layers it has."""
    numbered = [path for path in placed if is_numbered(path)]
    lists = {path.rpartition(".")[0] for path in numbered}
    if len(lists) != 1:
        shown = ", ".join(map(repr, sorted(lists))) or "none"
        raise ConfigError(
            f"the model has blocks in {len(lists)} containers ({shown}), and Megatron's layout "
            "speaks of one list of transformer layers",
            where="--to megatron",
            remedy="--to torch-pipelining takes any model",
        )
    paths = list(placed)
    begin, end = paths.index(numbered[0]), paths.index(numbered[-1])
    last = len(plan.stages) - 1
    outside = [(path, 0, "embedding") for path in paths[:begin]]
    outside += [(path, last, "head") for path in paths[end + 1 :]]
    between = next((path for path in paths[begin : end + 1] if path not in numbered), None)
    if between is not None:
        raise ConfigError(
            f"{between!r} runs between the layers, and Megatron's layout has none but these there",
            where="--to megatron",
            remedy="--to torch-pipelining takes any model",
        )
    for path, stage, what in outside:
        if placed[path] != stage:
            raise ConfigError(
                f"{path!r}, of the {what}, is on stage {placed[path]}, and Megatron has all of "
                f"that on stage {stage}",
                where="--to megatron",
                remedy=f"--pin {path}={stage} when you plan",
            )
    rows = []
    for stage in range(last + 1):
        count = sum(placed[path] == stage for path in numbered)
        rows.append("t" * count if count < 4 else f"t*{count}")
    return f"E{'|'.join(rows)}L", len(numbered)


def _refuse_several_calls(subject: Subject, placed: Mapping[str, int]) -> None:
    for path, count in runs_of_parts(subject.capture.train).items():
        if count > 1 and path in placed:
            raise ConfigError(
                f"{path!r} runs {count} times in a forward, and Megatron runs each layer once",
                where="--to megatron",
                remedy="--to torch-pipelining takes any model",
            )


def _tied_ends(subject: Subject, placed: Mapping[str, int]) -> bool:
    """Whether embedding and head share their weight, on one stage or on two.

    Raises:
        ConfigError: other weights are tied, which Megatron does not do.
    """
    holders: dict[str, list[str]] = {}
    for name, canonical in subject.tensors.items():
        holders.setdefault(canonical, []).append(name)
    shared = {c: names for c, names in holders.items() if len(names) > 1}
    for canonical, names in shared.items():
        parts = [_holder(name, placed) or name for name in names]
        order = list(placed)
        layers = [i for i, path in enumerate(order) if is_numbered(path)]
        at = [order.index(path) if path in order else len(order) for path in parts]
        if not (len(at) == 2 and min(at) < layers[0] and max(at) > layers[-1]):
            raise ConfigError(
                f"{canonical!r} is the weight of {' and '.join(map(repr, parts))}, and Megatron "
                "ties nothing but embedding and head",
                where="--to megatron",
                remedy="--to torch-pipelining",
            )
    return bool(shared)


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


def _refuse_tied(tied: Iterable[TiedParameter], to: str, why: str) -> None:
    for one in tied:
        stages = ", ".join(map(str, one.stages))
        raise ConfigError(
            f"weight {one.fqn!r} is tied over stages {stages}, and {to} {why}",
            where=f"--to {to}",
            remedy="--to torch-pipelining sums its gradients; or untie it in the model, or plan "
            "with Together for its holders",
        )


def _refuse_more_values(plan: Plan, to: str) -> None:
    """Refuse what goes past a stage, or beside the one value that a stage hands to the next."""
    for edge in plan.edges:
        if edge.gradient and edge.targets[-1] - edge.source > 1:
            raise ConfigError(
                f"value {edge.value!r} goes from stage {edge.source} to stage {edge.targets[-1]}, "
                f"and {to} sends nothing past a stage (a skip connection)",
                where=f"--to {to}",
                remedy="--to torch-pipelining hands it on from stage to stage",
            )
    for k in range(len(plan.stages) - 1):
        crossing = [edge.value for edge in plan.edges if edge.gradient and edge.source == k]
        if len(crossing) > 1:
            raise ConfigError(
                f"{len(crossing)} values go from stage {k} to stage {k + 1} "
                f"({', '.join(crossing[:3])}), and stages of {to} hand on one",
                where=f"--to {to}",
                remedy="--to torch-pipelining",
            )


def _equal_replicas(plan: Plan, to: str) -> int:
    counts = {stage.replicas for stage in plan.stages}
    if len(counts) > 1:
        raise ConfigError(
            f"stages have {sorted(counts)} replicas, and those of {to} all have equally many",
            where=f"--to {to}",
            remedy="plan with replicas='equal' or a number",
        )
    return counts.pop()


def _places(plan: Plan) -> int:
    """Pipeline ranks, replicas left out."""
    return len({own[0] for own in ranks_of(plan.stages)})


def _samples(plan: Plan, replicas: int) -> int:
    """Samples of a microbatch.  Raises ConfigError where they are not all of one size."""
    training = plan.training
    size, rest = divmod(training.batch_size, training.num_microbatches)
    if rest or training.batch_size % (replicas * size):
        raise ConfigError(
            f"{training.batch_size} samples in {training.num_microbatches} microbatches on "
            f"{replicas} replicas are not of one size",
            where="plan: training.num_microbatches",
            remedy="plan with a number of microbatches that divides the minibatch, and that the "
            "replicas divide",
        )
    return size


def _holder(name: str, parts: Mapping[str, object]) -> str | None:
    """The part that a tensor or module is in."""
    pieces = name.split(".")
    paths = (".".join(pieces[:n]) for n in range(len(pieces), 0, -1))
    return next((path for path in paths if path in parts), None)


def _around(placed: Iterable[str]) -> frozenset[str]:
    """Modules above the parts."""
    return frozenset(above for path in placed for above in ancestors(path)[:-1])


def _block_classes(subject: Subject, placed: Mapping[str, int]) -> set[str]:
    classes = subject.capture.train.classes
    numbered = [path for path in placed if is_numbered(path)]
    kinds = {classes[path][0] for path in numbered if path in classes}
    return {kind.rpartition(".")[2] for kind in kinds if not kind.startswith("torch.nn.")}
