"""The table of options: one row each, which `compile`, `Workload`, command line and docs read.

An option is a field of one of these classes, whose `Row` has its help, check, flag and place in a
plan (`pdcompile.options.row` explains these).  To add one: a field here, its name, type and default
in the signature of `pdcompile.compile`, and the code that reads it.  `tests/test_options.py` holds
the table to signature, `Workload` and flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pdcompile.clusters import names as machines
from pdcompile.options import texts, values
from pdcompile.options.row import Flag, Row, option, rows_of
from pdcompile.options.values import count, number, one_of
from pdcompile.parts.shard import Split
from pdcompile.schedule.registry import (
    DEFAULT,
    KINDS,
    described,
    in_turn,
    names,
    several_a_rank,
    usual_stages,
)

COUNTED = next(kind.name for kind in KINDS.values() if kind.extra is not None)
USES_STAGES = ("verify", "run")  # verbs that take generated stages
PLANNING = ("plan", "whatif")  # verbs that make plans


def default_optimizer(parameters: Any) -> Any:
    """The default of `compile` and `reference`: AdamW at 3e-4."""
    import torch

    return torch.optim.AdamW(parameters, lr=texts.LR)


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training."""

    loss_fn: Callable[..., Any] | None = option(
        None,
        "(output, target) -> scalar; None: the model returns its loss (a scalar, an output with "
        '``.loss``, or a dict with ``"loss"``).',
        check=values.loss_fn,
    )
    optimizer: Callable[..., Any] | None = option(
        default_optimizer,
        "Called with this rank's parameters (``.named`` has their names), returns a torch "
        "Optimizer, or a list of several (Muon for matrices, AdamW for the rest), which become "
        "one; default AdamW at 3e-4; None: gradients only.",
        "It steps once a stage, in one process too: step hooks run once a stage, and one that "
        "couples parameters of different stages (a norm of all gradients inside of step) is "
        "refused. A schedule of inference makes none.",
        check=values.optimizer,
        of_training=True,
        flag=Flag(
            "CLASS|FILE:FUNCTION|none",
            str,
            help="A class of torch.optim, or a function of parameters (.named: with names) "
            "that makes an optimizer; its state counts in memory. Default: TARGET's, or AdamW.",
        ),
    )
    # A name, or the tasks of a file: a path is read at once.
    schedule: str = option(
        DEFAULT,
        f"{described()}; auto: the planner chooses of those that update as eager does, and "
        f"that max_staleness allows; or the path of a .csv file with one of your own "
        f"(pdcompile schedule --help). Default: {DEFAULT}.",
        f'"{COUNTED}+2" puts two forwards more before each rank\'s first backward.  '
        '"auto" decides microbatches and warm-up too, as ``pdcompile plan`` does, and takes two '
        "stages a rank only where `stages` is left out.  Of a file stages, ranks and microbatches "
        "are what it says.",
        plan="training.schedule",
        compared=True,
        flag=Flag(read=texts.schedule),
    )
    recompute: bool | Literal["auto"] | Sequence[bool] = option(
        False,
        "Keep only a stage's inputs of each microbatch, and run forward again just before "
        "backward: less memory for more time, the same results to the last bit.",
        'False: no stage, the default; True: all; a bool for each stage; "auto": the planner '
        "decides, and lets those recompute that would not fit into their memory.",
        check=values.recompute,
        plan="stages: recompute",
        compared=True,
        flag=Flag(
            "off|on|auto|1,0,…",
            texts.recompute,
            remedy="one of off, on, auto, or 0 and 1 for each stage, such as 1,0,1",
            more="All stages, where memory asks for it, or one number a stage; default: off.",
        ),
    )
    microbatches: int | Literal["auto"] = option(
        "auto",
        "Pieces that a minibatch is split into "
        f"({', '.join(names(lambda k: k.updates_each))}: 1), or auto.",
        check=count("'auto'"),
        plan="training.num_microbatches",
        compared=True,
        flag=Flag(
            "M",
            texts.counts("auto"),
            remedy="a number such as 8, auto, or several for plan: 4,8,16",
            more="pdcompile plan takes several to choose from: 4,8,16.",
        ),
    )
    batch_dims: Any = option(
        0,
        "The dimension of each input that counts samples; None: nothing is split.  A list with an "
        'element for each sample is refused; {"levels": 0}: it is one of whole batches.',
        check=values.batch_dims,
        of_training=True,
        compared=True,
    )
    loss_reduction: Literal["mean", "sum"] | Callable[..., Any] = option(
        "mean",
        "What the loss is over a minibatch: the mean (default) or sum of its samples' losses, or "
        "a mean over the items that a function (args, kwargs, target) counts.",
        check=values.loss_reduction,
        plan="training.loss_reduction",
        of_training=True,
        compared=True,
        flag=Flag("mean|sum|FILE:FUNCTION", texts.reduction),
    )
    autocast: Any = option(
        None,
        "Run model and loss in torch.autocast: bfloat16 or float16.",
        "A dtype, or a torch.autocast(…), as in ``with torch.autocast(…): loss = "
        "loss_fn(model(x), y)``.",
        check=values.autocast,
        plan="training.autocast",
        of_training=True,
        flag=Flag("DTYPE", str),
    )
    grad_scaler: Any = option(
        None,
        "Scale losses for float16, and skip updates for which a gradient is not finite on any "
        "stage, as a torch.amp.GradScaler does.",
        "True: with torch's defaults.  The pipeline does what its `scale`, `unscale_`, `step` and "
        "`update` do; `get_scale()` and `state_dict()` are those after the last call.  For `step` "
        "alone.",
        plan="training.loss_scaling",
        of_training=True,
        flag=Flag(type=bool),
    )
    max_grad_norm: float | None = option(
        None,
        "Clip gradients to this norm over all stages.",
        check=values.norm,
        plan="training.max_grad_norm",
        of_training=True,
        compared=True,
        flag=Flag(type=float),
    )
    linear_lr_scaling: bool = option(
        False,
        "Learning rates in proportion to the replicas of a stage, where an update averages a "
        f"minibatch of each ({in_turn()}).",
        "That of r replicas is r times that of the optimizer divided by the replicas of the first "
        "stage, as PipeDream has it (Narayanan et al., SOSP 2019).",
        check=one_of(False, True),
        plan="training.linear_lr_scaling",
        of_training=True,
        compared=True,
        flag=Flag(type=bool),
    )
    seed: int = option(
        0,
        "Seed of dropout and all other random ops, and of the search; default: 0.",
        check=number(integer=True, least=0),
        plan="training.seed",
        of_training=True,
        compared=True,
        flag=Flag(type=int),
    )
    outputs: Literal["none", "evaluation", "last", "everything", "all"] = option(
        "last",
        "Outputs of training steps: none (evaluation: none, and evaluation's on all ranks); what "
        "the last stage makes; everything, of earlier stages too, which is sent to it; and all of "
        "that on all ranks. Evaluation gives everything. Default: last, where that takes at most "
        "64 MB, and 2 % of a device's limit.",
        "Else they are dropped: a warning tells their bytes, and reading them raises; in one "
        'process "last" drops nothing.  What earlier stages make and the last one does not is a '
        "mark (`OmittedOutput`), and a note of the plan names it.  What only outputs need is not "
        'even computed under "none".  Ranks that get no outputs have None.',
        check=one_of(*values.OUTPUTS),
        plan="training.keeps_outputs",
        of_training=True,
        flag=Flag("|".join(values.OUTPUTS), texts.words(*values.OUTPUTS)),
    )
    keep_model: bool = option(
        False,
        "Train a copy and leave `model` as it is.",
        check=one_of(False, True),
    )


@dataclass(frozen=True)
class MachineOptions:
    """Options of the machines that a pipeline runs on."""

    cluster: Any = option(
        "auto",
        "cluster.toml, 2x4 (hosts x devices), 2x8:h100 (of machines with a name: "
        f"{', '.join(machines())}), local:4 (four stages in one process), or auto: one device a "
        "process.",
        "Or a Cluster.",
        check=values.cluster,
        flag=Flag("WHAT"),
    )
    stages: int | None = option(
        None,
        f"Stages; default: {usual_stages()}. Under {several_a_rank()} also a multiple of the "
        "devices, which take turns.",
        "Stage s is then on device s mod R of R, or out over the devices and back, as the schedule "
        "places them.  "
        "In one process without a cluster these have two on a device.",
        check=count("None: one a device"),
        plan="stages",
        compared=True,
        flag=Flag(type=int),
    )
    replicas: int | tuple[int, ...] | Literal["1", "equal", "any"] = option(
        1,
        "Devices of a stage, which take microbatches in turn: so many for all stages, one number "
        "a stage, equally many for all, or as many as is best (any); default: 1.",
        'With "equal" and "any" the planner decides the number of stages too where `stages` is '
        f"None.  Replicas sum their gradients; under {in_turn()} they take minibatches in turn, "
        "and the stage updates after one of each.  One stage with replicas is data parallelism.  "
        "Where a device holds several stages, all have equally many.",
        check=values.replicas,
        plan="stages: replicas",
        compared=True,
        flag=Flag(
            "R|R,R,…|equal|any",
            texts.counts("equal", "any"),
            remedy="a number for all stages (2), one for each (3,1), equal or any",
        ),
    )
    #: a tuple of equal numbers becomes one (see `Options`)
    parts: int | tuple[int, ...] | Literal["any"] = option(
        1,
        "Ranks that compute each stage together, every op divided between them (tensor, sequence "
        "and context parallelism); any: the planner chooses; default: 1.",
        "A stage then takes replicas times parts ranks, and the parts of one follow each other. "
        "(2, 1): the first of two stages in 2 parts, the second whole; any: one number for all "
        "stages, and their split where that is auto.",
        check=values.parts,
        plan="training.parts",
        compared=True,
        flag=Flag(
            "N|N,N,…|any",
            texts.counts("any"),
            remedy="a number for all stages (2), that of each (2,1), or any",
        ),
    )
    split: Split = option(
        "auto",
        "What parts divide: width (heads and hidden units, as Megatron-LM), width+sequence (and "
        "activations between them along the sequence), sequence (heads in attention alone, as "
        "DeepSpeed-Ulysses), context (the sequence alone), samples (those of each microbatch), "
        "experts (all else by width), experts+samples (all else by samples), weights+samples "
        "(samples, and each part holds slices of weights, which are gathered before use: FSDP, "
        "ZeRO-3); auto: width, samples where that divides nothing.",
        check=one_of(*values.SPLITS),
        plan="training.split",
        compared=True,
        flag=Flag("|".join(values.SPLITS), texts.words(*values.SPLITS)),
    )
    updates: Literal["every", "home", "auto"] = option(
        "every",
        "Replicas of a stage that update its weights: every one of them; or each parameter at one, "
        "its home, which alone has its optimizer state and gets its gradient, and sends the new "
        "weights to the others (ZeRO-1); auto: the planner chooses; default: every.",
        "Homes are balanced by bytes.  For `step` alone.",
        check=one_of("every", "home", "auto"),
        plan="training.updates",
        compared=True,
        flag=Flag("every|home|auto", texts.words("every", "home", "auto")),
    )
    memory: int | str | None = option(
        None,
        "Memory limit of every device, for example '16 GB' or '512 MiB'.",
        "A number is one of bytes.",
        check=values.memory,
        flag=Flag("BYTES", verbs=("plan", "dump", *USES_STAGES)),
    )
    group: Any = option(
        None,
        "A torch.distributed group to run on instead of all ranks.",
        check=values.group,
    )


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search for a plan."""

    constraints: Sequence[Any] = option(
        (),
        'CutAt("model.layers.*") (cuts between blocks alone), CutBefore, Pin, Together, '
        "Apart, Split of `pdcompile.problem.constraints`.",
        check=values.constraints,
        compared=True,
        of_search=True,
    )
    cut_tolerance: float | None = option(  # None: as much as `border_cuts` has
        None,
        "How much slower than the fastest plan found one may be whose cuts lie at borders of "
        "modules and send less; default: 0.01, 1 %. 0: the fastest.",
        check=number(least=0),
        compared=True,
        of_search=True,
        flag=Flag("SHARE", type=float),
    )
    costs: Any = option(
        "measured",
        "measured: time the ops here; estimated: from FLOPs and bytes, as for GPUs too where torch "
        "finds none; from Python also a Profile.",
        "Measured ones are kept in ~/.cache/pdcompile (PDCOMPILE_CACHE: another folder, or off).",
        flag=Flag(),
    )
    refine: bool | Literal["auto"] = option(
        "auto",
        "Time the planned stages, rescale the costs of their ops and plan again, at most twice; "
        "auto: with measured costs, when that takes seconds.",
        check=one_of("auto", True, False),
        flag=Flag("auto|on|off", texts.words("auto", on=True, off=False)),
    )
    max_staleness: int | Literal["any"] = option(
        0,
        "With schedule auto: how many minibatches old the weights may be that gradients are of; 1 "
        f"and any allow {', '.join(names(lambda k: k.by_planner and k.lag == 1))}.",
        check=one_of(0, 1, "any"),
        compared=True,
        of_search=True,
        flag=Flag("0|1|any", texts.words(0, 1, "any"), verbs=PLANNING),
    )
    time_limit: float | None = option(
        None,
        "Stop the search after so many seconds, with the best plan and its gap; default: 20, or "
        "less where only the cut is open and a search has no news.",
        check=number(least=0),
        of_search=True,
        flag=Flag("SECONDS", type=float),
    )


@dataclass(frozen=True)
class GivenOptions:
    """Options that take the place of passes, and those of checks and progress."""

    plan: Any = option(
        None,
        "Use this plan instead of searching for one.",
        "A Plan or plan.json.  Options that it records are then the plan's where they are left "
        "out (schedule, stages, microbatches, replicas, recompute, seed, max_grad_norm, autocast, "
        "…), and refused where they say something else.  Loss and optimizer it does not hold, nor "
        "a function as loss_reduction.",
        check=values.plan,
        flag=Flag("FILE", type=Path, verbs=("dump", *USES_STAGES)),
    )
    sources: Any = option(
        None,
        "Use the stages in this folder, which dump wrote, with its plan.json.",
        check=values.path("a folder that dump wrote"),
        flag=Flag("FOLDER", type=Path, verbs=USES_STAGES),
    )
    allow_edited: bool = option(
        False,
        "Use the stages of sources also where they were edited.",
        check=one_of(False, True),
        flag=Flag(type=bool, verbs=USES_STAGES),
    )
    verify: Literal["auto", "full", "off"] = option(
        "auto",
        '"auto" compares the stages with eager before the first step, and where the model does not '
        'fit, or has no memory, their ops alone; "full" also a second step of models where one '
        'takes long, and what a full batch gives; "off".',
        check=one_of(
            "auto", "full", "off",
            or_else='; "auto" compares the ops of a model that is too large to be run here',
        ),
    )  # fmt: skip
    weights: Any = option(
        None,
        "For a model on the meta device: a .safetensors file, an index or a folder of such files "
        "(Hugging Face layout), or several. Each process reads its own stage, one tensor at a "
        "time.",
        "Or a function (name, tensor) that fills one tensor in place, or a list of files and one "
        "function for what they do not have.",
        flag=Flag("FILE", type=list[Path], verbs=("run",)),
    )
    resume: str | PathLike[str] | None = option(
        None,
        "A folder that `pipe.save` wrote: training goes on from its last checkpoint, and begins "
        "where it is empty or not there.  The plan is the checkpoint's where that fits, and any "
        "other one where not; `pipe.position` says how many minibatches are over.",
        check=values.path("a folder that pipe.save wrote"),
    )
    stage_compiler: str | Callable[..., Any] | None = option(
        None,
        "Run each stage through torch.compile with this backend: inductor, aot_eager, …; None: as "
        "it is.",
        "A name of torch.compiler.list_backends(), or a function as torch.compile takes one.  "
        "Ranks compile their stages side by side, before the first step.  Masks of dropout are "
        "eager's, opaque modules and the loss_fn are not compiled, and no backward is split.",
        check=values.backend,
        flag=Flag("NAME", str, verbs=("run", "verify")),
    )
    progress: bool | Literal["auto"] = option(
        "auto",
        '"auto": a bar on stderr while a model is compiled, where that is a terminal; True: '
        "elsewhere a line for each pass; False: nothing.",
        check=one_of("auto", True, False),
    )


@dataclass(frozen=True)
class FailureOptions:
    """Options that find failures."""

    detect_nonfinite: bool = option(
        False,
        "Name the first op that makes NaN; several times as slow.",
        "Raises NonFiniteError, for an infinite gradient or loss too, with op, stage and "
        "microbatch.",
        check=one_of(False, True),
        flag=Flag(type=bool, verbs=("run",)),
    )
    stall_timeout: float | None = option(
        30.0,
        "Seconds without a sign of life from a rank's process after which all ranks end.",
        "Its process was stopped, its host or network is gone, or Python's lock is held.  None: "
        "never.",
        check=number(least=1),
        flag=Flag("SECONDS", type=float, verbs=("run",)),
    )
    progress_timeout: float | None = option(
        300.0,
        "Seconds in which all ranks wait for each other and none goes on, after which they end.",
        "A message was lost, or a rank never starts; one that computes is only slow.  None: never.",
        check=number(least=1),
        flag=Flag("SECONDS", type=float, verbs=("run",)),
    )


PANELS: Mapping[str, type] = {  # of the help, in the order of `compile`'s
    "Training": TrainingOptions,
    "Machines": MachineOptions,
    "Search": SearchOptions,
    "Plans, stages and weights": GivenOptions,
    "Failures": FailureOptions,
}
ROWS: Mapping[str, Row] = rows_of(PANELS)
