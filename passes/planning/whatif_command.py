"""The command that makes a plan that whatif announced.

What the plan itself tells is taken from there; TARGET, and how costs and the optimizer were given,
from the command that made it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pdcompile.cluster import Cluster
from pdcompile.passes.planning.whatif import SolvedScenario, Whatif, extra_warmup
from pdcompile.plan import Plan, Training
from pdcompile.problem import Wish
from pdcompile.problem.constraints import KINDS, Constraint, Forbid, Pin, option, read
from pdcompile.units import exact_bytes

CHANGED = "changed.toml"  # where nothing shorter describes the machines

Words = Iterator[tuple[str, str]]  # an option and its value; "": it has none


def command(
    found: Whatif, plan: Plan, output: str = "plan.json", written: Path | None = None
) -> tuple[str, tuple[str, ...]]:
    """The command that makes such a plan, in one line, and what has to be known of it.

    Args:
        plan: the one that was asked about, whose other options the new one gets.
        output: the file of the new plan.
        written: the file of the changed cluster, where there is one.
    """
    target, made = (plan.command[0], plan.command[1:]) if plan.command else ("TARGET", ())
    given = dict(text.partition("=")[::2] for text in made)
    words = [
        *_machines(found, given, written),
        *_planned(found.after),
        *_trained(found.after.training, given, known=bool(plan.command)),
    ]
    if not made and any(note.startswith("costs are estimated") for note in plan.notes):
        words.append(("--costs", "estimated"))
    words += [pair for pair in given.items() if pair[0] not in _decided()]
    words.append(("-o", output))
    line = " ".join(["pdcompile plan", shlex.quote(target), *map(_written, words)])
    return line, tuple(_notes(found, plan, dict(words)))


def _written(word: tuple[str, str]) -> str:
    name, value = word
    return f"{name} {shlex.quote(value)}" if value else name


def _notes(found: Whatif, plan: Plan, words: dict[str, str]) -> Iterator[str]:
    size = found.after.training.batch_size
    if size != found.before.training.batch_size:
        yield f"this plan is for minibatches of {size} samples: TARGET has to give such ones"
    if words["--cluster"] == CHANGED:
        yield f"--write-cluster {CHANGED} makes that file"
    if words.get("--loss-reduction") == "FILE:FUNCTION":
        yield "FILE:FUNCTION is the function that counts items"
    if not plan.command:
        yield (
            "the plan does not tell the command that made it: give the optimizer and costs that it "
            "was made with"
        )


def _decided() -> set[str]:
    """Options whose values are in the plan."""
    names = {
        "cluster", "stages", "memory", "schedule", "microbatches", "warmup", "max-staleness",
        "replicas", "recompute", "cut-tolerance", "autocast", "loss-reduction", "outputs",
        "max-grad-norm", "grad-scaler", "linear-lr-scaling", "seed",
        *(name.replace("_", "-") for name in KINDS),
    }  # fmt: skip
    return {f"--{name}" for name in names}


def _planned(after: SolvedScenario) -> Words:
    """What the planner is asked for: the fastest plan of one cut."""
    training, stages = after.training, len(after.problem.stages)
    extra = extra_warmup(training, stages)
    if extra or stages < len(after.cluster.devices):  # then some are left out
        yield "--stages", str(stages)
        yield "--warmup", str(extra)
    yield "--schedule", training.schedule
    yield "--microbatches", str(training.num_microbatches)
    yield "--cut-tolerance", "0"  # whatif knows no modules, and prefers no cut
    for wish in after.problem.wishes:
        constraint = _now(wish)
        if constraint is not None:
            yield option(constraint)


def _now(wish: Wish) -> Constraint | None:
    """The constraint, with the stages that it is about in the changed problem."""
    found = read(wish.text)
    if isinstance(found, Pin):
        return Pin(found.pattern, wish.pins[0][1]) if wish.pins else None
    if isinstance(found, Forbid):
        stages = sorted({stage for _, stage in wish.forbidden})
        return Forbid(found.pattern, *stages) if stages else None
    return found


def _trained(training: Training, given: Mapping[str, str], *, known: bool) -> Words:
    """What is trained, and what it gives; a function that no `known` command names is TARGET's."""
    if training.autocast is not None:
        yield "--autocast", training.autocast.rpartition(":")[2]
    if training.loss_reduction == "callable":
        if "--loss-reduction" in given or not known:
            yield "--loss-reduction", given.get("--loss-reduction", "FILE:FUNCTION")
    elif training.loss_reduction != "mean":
        yield "--loss-reduction", training.loss_reduction
    if not training.outputs_by_size:
        sent = "everything" if training.sends_outputs else "last"
        yield "--outputs", sent if training.keeps_outputs else "none"
    if training.max_grad_norm is not None:
        yield "--max-grad-norm", repr(training.max_grad_norm)
    if training.loss_scaling:
        yield "--grad-scaler", ""
    if training.linear_lr_scaling:
        yield "--linear-lr-scaling", ""
    if training.seed:
        yield "--seed", str(training.seed)


def _machines(found: Whatif, given: Mapping[str, str], written: Path | None) -> Words:
    """The cluster, as it was given where it is the same, and the memory of its devices."""
    before, after = found.before.cluster, found.after.cluster
    if written is not None:
        yield "--cluster", str(written)
        return
    same = "--cluster" in given and _same_machines(before, after)
    if same and _limits(before) == _limits(after):
        yield from ((name, given[name]) for name in ("--cluster", "--memory") if name in given)
        return
    limit, *others = set(_limits(after))
    own = given["--cluster"] if same and limit is not None else _short(after)
    own = CHANGED if others else own
    yield "--cluster", own
    if limit is not None and own != CHANGED:
        yield "--memory", exact_bytes(limit)


def _limits(cluster: Cluster) -> list[int | None]:
    return [device.memory_bytes for device in cluster.devices]


def _short(cluster: Cluster) -> str:
    """A text for machines without limits, `CHANGED` where there is none."""
    count, inner = len(cluster.devices), cluster.levels[0].size
    names = [f"1x{count}", f"{count // inner}x{inner}"]
    known = {f"local:{count}": Cluster.local(count)} | {name: Cluster.parse(name) for name in names}
    return next((name for name, one in known.items() if _same_machines(cluster, one)), CHANGED)


def _same_machines(a: Cluster, b: Cluster) -> bool:
    """Whether plans for them are the same but for memory limits; names mean nothing."""

    def facts(one: Cluster) -> tuple[object, ...]:
        links = [
            (level.size, level.bytes_per_second, level.latency_seconds, level.full_duplex)
            for level in one.levels
            if level.size > 1
        ]
        return [replace(device, memory_bytes=None) for device in one.devices], links

    return facts(a) == facts(b)
