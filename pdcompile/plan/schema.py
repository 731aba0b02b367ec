"""The dataclasses of a plan."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from os import PathLike
from typing import Literal

from pdcompile.cluster import Cluster
from pdcompile.errors import PlanError, ScheduleError, errors_as
from pdcompile.files import read_limited
from pdcompile.jsonio import COMPACT, canonical, decode, dumps, encode, loads
from pdcompile.parts.shard import Split
from pdcompile.plan.seal import check_seal, seal_of
from pdcompile.plan.validate import depths, pipeline, validate
from pdcompile.problem import PartitionProblem
from pdcompile.problem.constraints import SplitAxis
from pdcompile.problem.deployment import StageDeployment
from pdcompile.schedule.registry import DEFAULT, ScheduleKind, kind_of
from pdcompile.schedule.spec import PipelineSpec
from pdcompile.schedule.turns import Pattern, in_turn

SCHEMA = "pdcompile.plan/5"
COPIED = 2.0  # bytes moved per byte that is copied: read, and written
CLIPPED = 3.0  # read for the norm, then read and written once more


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof of a plan: its objective, the bound, by whom it was proved, and in which scope.

    `fastest_seconds`: the objective of a faster plan that was found, where this one is preferred
    for its cuts; None: this is the fastest.
    """

    objective_seconds: float
    bound_seconds: float
    status: Literal["optimal", "feasible"]
    prover: str  # "brute force" | "dynamic program over all ideals" | "CP-SAT" | "relaxation"
    seconds: float  # wall time of the search
    scope: str  # of which plans it speaks: "all plans with …"
    fastest_seconds: float | None = None

    @property
    def gap(self) -> float:
        """(objective − bound) / objective; at most 1e-5 counts as 0 (integer rounding)."""
        if self.objective_seconds <= 0:
            return 0.0
        gap = (self.objective_seconds - self.bound_seconds) / self.objective_seconds
        return gap if gap > 1e-5 else 0.0


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another value of one choice, and the fastest plan tried with it: seconds of its step."""

    choice: str  # "schedule", "stages", "replicas", "updates", "parts" and others
    own: str
    value: str
    step_seconds: float


NOT_CERTIFIED = Certificate(0.0, 0.0, "feasible", "", 0.0, "")


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes that one rank will hold when it holds the most, by line."""

    weights_bytes: int = 0  # all versions
    gradients_bytes: int = 0
    optimizer_bytes: int = 0  # its state
    activations_bytes: int = 0  # saved for backward, times in flight
    receive_bytes: int = 0  # receive slots, and gradients and weights on their way
    send_bytes: int = 0  # what only a send still needs
    workspace_bytes: int = 0  # of a backward
    temporaries_bytes: int = 0  # of the optimizer's step
    inputs_bytes: int = 0  # copies of what the caller gave, where minibatches overlap
    outputs_bytes: int = 0  # of this minibatch and the last one, for the caller

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: ops of the train graph in topological order, and where it runs."""

    index: int
    ops: tuple[str, ...]
    parameters: tuple[str, ...]  # canonical FQNs held here (tied copies included), sorted
    replicas: int = 1
    ranks: tuple[int, ...] = ()
    forward_seconds: float = 0.0  # per microbatch, on this stage's device
    backward_seconds: float = 0.0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    largest_gradient_bytes: int = 0  # of one of its parameters; 0: unknown
    saved_bytes: int = 0  # per microbatch in flight; with `recompute` of one microbatch only
    workspace_bytes: int = 0
    first_workspace_bytes: int = 0  # of a minibatch's first backward, its gradients too; 0: unknown
    recompute: bool = False  # runs its forward again, from its inputs, just before a backward
    step_bytes: int = 0  # temporaries of the optimizer's step on this stage's parameters
    update_seconds: float = 0.0  # of one update, for which parts may sum gradients first
    input_bytes: int = 0  # what it reads of the caller's tensors, of a whole minibatch
    output_bytes: int = 0  # what it makes for the caller, per microbatch
    split_bytes: int = 0  # kept between the parts of a split backward; 0: unknown, as many as saved
    split_workspace_bytes: int = 0  # of its second part, beside those
    split_freed_bytes: int = 0  # results that its first part no longer needs
    split_first_workspace_bytes: int = 0  # of that part; 0: as of a whole backward
    forward_workspace_bytes: int = 0
    loose_bytes: int = 0  # of the saved ones: results that are held only until they are out
    freed_bytes: int = 0  # by how much a whole backward's peak is lower where they are out
    home_bytes: tuple[int, ...] = ()  # of weights that each replica updates; empty: all of them
    #: replicas in the order in which they take microbatches, over and over; empty: each in turn
    turns: Pattern = field(default=(), metadata=COMPACT)
    #: seconds of each replica by those of the slowest, which are the stage's; empty: all alike
    paces: tuple[float, ...] = field(default=(), metadata=COMPACT)

    @property
    def deployment(self) -> StageDeployment:
        """Replicas and recomputation."""
        return StageDeployment(self.replicas, self.recompute)

    @property
    def backward_pass_seconds(self) -> float:
        """Seconds of BACKWARD of one microbatch: the forward again too, when recomputing."""
        return self.backward_seconds + self.deployment.again(self.forward_seconds)


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that crosses stages: sent from `source` once to each of `targets` (ascending).

    When `gradient`, the gradient is chained: last target → … → first target → source, each
    passing on the sum that it received plus its own contribution (eager's summation order).
    """

    value: str
    source: int
    targets: tuple[int, ...]
    bytes: int  # per microbatch of the planned size
    gradient: bool
    shape: tuple[str, ...] = ()  # as text, "b" is the microbatch size
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class TiedUses:
    """The stages of the ops that read a tied parameter in one call of a module, in order."""

    module: str  # FQN; "" is the model
    call: int  # of the calls of this module in a forward
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A trainable parameter held by several stages; `stages[0]` is the owner.

    Each of these stages accumulates its own gradient over a minibatch; once an update, from the
    last stage to the owner, each adds its own and passes the sum on.  The owner alone steps the
    optimizer and sends the new weights to the others.  `uses`: which stage runs each op that reads
    it, for `pdcompile.reference`, which accumulates the gradients of each stage apart.
    """

    fqn: str
    stages: tuple[int, ...]
    bytes: int
    uses: tuple[TiedUses, ...] = ()


@dataclass(frozen=True, slots=True)
class Training:
    """The part of the configuration that changes what is computed: part of the fingerprint."""

    schedule: str = DEFAULT
    num_microbatches: int = 1
    batch_size: int = 1  # global minibatch, samples
    warmup: tuple[int, ...] = ()  # per stage: forwards before the first backward, beyond one
    loss_reduction: str = "mean"  # mean | sum | callable
    autocast: str | None = None
    max_grad_norm: float | None = None
    optimizer_factor: float = 2.0
    seed: int = 0
    # what the optimizer's step needs for a moment, per byte of the parameter whose turn it is, of
    # the one before it, and of all that the stage updates
    step: tuple[float, float, float] = (0.0, 0.0, 0.0)
    step_moved: float = 0.0  # bytes that the step's kernels read and write, per byte of weights
    moving_seconds: float = 0.0  # per byte that is moved, on a device of speed 1
    host_seconds: float = 0.0  # of Python in an update of a stage and its part of a call
    keeps_outputs: bool = True  # the caller gets outputs of training, not the loss alone
    sends_outputs: bool = True  # those of earlier stages too, which are sent to the last one
    outputs_by_size: bool = False  # nobody named any: they are kept where they take little
    linear_lr_scaling: bool = False  # a stage's learning rate is in proportion to its replicas
    #: who updates weights that replicas hold: each of them, or one, their home
    updates: Literal["every", "home"] = "every"
    loss_scaling: bool = False  # losses are scaled for float16, and updates skipped (GradScaler)
    #: ranks that compute each microbatch of a stage together; of each stage where they are unlike
    parts: int | tuple[int, ...] = 1
    split: Split = ""  # along what its ops are divided between them: a family of `passes.parts`
    #: pattern and axis of modules that are divided otherwise: constraints `Split`
    module_splits: tuple[tuple[str, SplitAxis], ...] = ()

    @property
    def most_parts(self) -> int:
        """Parts of the stages that are divided; 1 where none is."""
        return self.parts if isinstance(self.parts, int) else max(self.parts)

    @property
    def sharing(self) -> int:
        """Parts that share the samples of each microbatch; 1 where none does."""
        axes = [self.split, *(axis for _, axis in self.module_splits)]
        return self.most_parts if any(axis.endswith("samples") for axis in axes) else 1

    @property
    def kind(self) -> ScheduleKind:
        """The row of the schedule.  Raises ScheduleError where there is none of that name."""
        return kind_of(self.schedule)

    @property
    def scale(self) -> int:
        """Objectives in a step: of a stream they are seconds of a microbatch."""
        return 1 if self.kind.drains else self.num_microbatches

    @property
    def joint(self) -> bool:
        """True if an update waits for all stages: for their norms, or until all are finite."""
        return self.max_grad_norm is not None or self.loss_scaling

    def step_bytes(self, sizes: Iterable[int]) -> int:
        """Temporaries of an update of parameters of these sizes in bytes, in this order."""
        of_one, of_previous, of_all = self.step
        most = previous = total = 0
        for size in sizes:
            most = max(most, math.floor(of_one * size + of_previous * previous))
            previous, total = size, total + size
        return most + math.floor(of_all * total)

    def update_seconds(self, owned: int, *, versions: bool, rate: float | None = None) -> float:
        """Seconds of an update of so many bytes of weights: those of the bytes that are moved.

        Where there are `versions` the newest is copied first; where gradients are clipped, or
        losses scaled, they are read and multiplied.  `rate`: bytes a second of another memory.
        """
        moved = self.step_moved + CLIPPED * self.joint + COPIED * versions
        each = self.moving_seconds and (self.moving_seconds if rate is None else 1 / rate)
        return owned * moved * each + self.host_seconds


@dataclass(frozen=True, slots=True)
class Forecast:
    """One step in steady state, by the simulator."""

    step_seconds: float
    samples_per_second: float
    bubble: float  # idle fraction of the devices' time
    sent_bytes: tuple[int, ...]  # per rank and step
    ledgers: tuple[MemoryLedger, ...]  # per rank


@dataclass(frozen=True)
class Plan:
    """Everything that the schedule, the code generator and the runtime need to know.

    `problem` is what the planner was given (see `pdcompile.plan.embedded`); only `explain`,
    `diff`, `whatif` and reports read it.  `model` is the class of the model, for people.
    `command`: TARGET and options (``--name=value``) of the command that made it, for `whatif`.
    `rehearsed`: a digest of what stages hold and of all that decides it, see `with_own_bytes`.
    `costs`: what its times come from, where that is not the kind of device that it is for.
    `alternatives`: where more than the cut was open, what the next-best value of each choice costs.
    """

    fingerprint: str  # of graph, costs and cluster
    stages: tuple[StagePlan, ...]
    edges: tuple[Edge, ...]
    tied: tuple[TiedParameter, ...]
    training: Training
    cluster: str  # canonical TOML text of the cluster
    certificate: Certificate
    forecast: Forecast | None = None
    notes: tuple[str, ...] = ()
    schema: str = SCHEMA
    problem: PartitionProblem | None = field(default=None, metadata=COMPACT)
    model: str = field(default="", metadata=COMPACT)
    command: tuple[str, ...] = field(default=(), metadata=COMPACT)
    rehearsed: str = field(default="", metadata=COMPACT)
    costs: str = field(default="", metadata=COMPACT)  # "estimated costs", "costs measured on a CPU"
    alternatives: tuple[Alternative, ...] = field(default=(), metadata=COMPACT)

    @cached_property
    def spec(self) -> PipelineSpec:
        """All that decides the schedule.  Raises ScheduleError where none of ours fits."""
        training = self.training
        kind_of(training.schedule, where="plan: training.schedule")
        for path, message, remedy in chain(depths(self), pipeline(self)):
            raise ScheduleError(message, where=f"plan: {path}", remedy=remedy)
        return PipelineSpec(
            training.schedule,
            training.num_microbatches,
            training.warmup,
            self.ranks,
            self.edges,
            self.tied,
            training.joint,
            training.updates == "home",
            tuple(stage.turns for stage in self.stages) if self.patterned else (),
            self.once,
            self.fetched,
        )

    @property
    def once(self) -> bool:
        """True if replicas of a stage read its weights in one memory of their host."""
        kind, homes = self.training.kind, self.training.updates == "home"
        here = self.fetched or not self.cluster or self.machines.on_host
        return kind.dispatched and homes and here

    @property
    def fetched(self) -> bool:
        """True if that memory is not their devices', who get a stage's weights when they run it."""
        kind, homes = self.training.kind, self.training.updates == "home"
        again = all(stage.recompute and stage.replicas > 1 for stage in self.stages)
        return kind.dispatched and homes and again and bool(self.cluster) and self.machines.apart

    @property
    def host_bytes(self) -> int:
        """Bytes of weights, gradients and optimizers' states in that memory, of all ranks."""
        spec, found = self.spec, 0
        for s, stage in enumerate(self.stages if self.fetched else ()):
            trained = spec.versions(s) - 1 + stage.replicas * spec.gradient_buffers(s)
            found += stage.parameter_bytes + trained * stage.trainable_bytes
            found += math.floor(self.training.optimizer_factor * sum(stage.home_bytes))
        return found

    @property
    def patterned(self) -> bool:
        """True if replicas of a stage take microbatches in other turns than one after the other."""
        return any(stage.turns not in ((), in_turn(stage.replicas)) for stage in self.stages)

    def scale_of(self, stage: int, minibatch: int) -> float:
        """Factor of the learning rate in a stage's update of a minibatch."""
        linear = self.training.linear_lr_scaling
        counts = self.stages[stage].replicas, self.stages[0].replicas
        return self.spec.rate(stage, minibatch) * (counts[0] / counts[1] if linear else 1.0)

    @property
    def made_of(self) -> str:
        """The model's class, and the target as the command line had it."""
        target = f" of {self.command[0]}" if self.command else ""
        return f"{self.model or 'a model'}{target}"

    @property
    def named_reduction(self) -> str:
        """The function that the command which made it named as the loss reduction; "": none."""
        name = "--loss-reduction="
        found = (word.removeprefix(name) for word in self.command if word.startswith(name))
        return next(found, "")

    @cached_property
    def machines(self) -> Cluster:
        """The cluster that it is for.  Raises ClusterError: the text is none."""
        return Cluster.from_toml(self.cluster, where="plan: cluster")

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The stage of each op, by name."""
        return {op: s for s, stage in enumerate(self.stages) for op in stage.ops}

    @property
    def ledgers(self) -> tuple[MemoryLedger, ...]:
        """Memory of each rank by the forecast; empty without one."""
        return () if self.forecast is None else self.forecast.ledgers

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage; where a plan names none, they follow each other."""
        return tuple(ranks_of(self.stages))

    @property
    def num_ranks(self) -> int:
        """Ranks that run something; one may hold several stages."""
        return len({rank for ranks in self.ranks for rank in ranks})

    @property
    def num_processes(self) -> int:
        """Processes that run it: one for each part of a rank's stages."""
        return sum(self.parts_of_rank[rank] for rank in {r for ranks in self.ranks for r in ranks})

    def parts_of_stage(self, stage: int) -> int:
        """Parts of a stage; 1 where it is whole."""
        parts = self.training.parts
        return parts if isinstance(parts, int) else parts[stage]

    @property
    def parts_in_words(self) -> str:
        """``2 parts``, or ``2, 1 parts`` of stages in order."""
        parts = self.training.parts
        return f"{parts if isinstance(parts, int) else ', '.join(map(str, parts))} parts"

    @cached_property
    def parts_of_rank(self) -> tuple[int, ...]:
        """Parts of the stages of each rank."""
        parts = self.training.parts
        found = [parts if isinstance(parts, int) else 1] * self.num_columns
        for stage, ranks in enumerate(self.ranks):
            for rank in ranks:
                found[rank] = self.parts_of_stage(stage)
        return tuple(found)

    def processes_of(self, *ranks: int) -> tuple[int, ...]:
        """The processes that run the stages of ranks: the parts of a stage follow each other."""
        first = [0, *accumulate(self.parts_of_rank)]
        return tuple(p for rank in ranks for p in range(first[rank], first[rank + 1]))

    @property
    def num_columns(self) -> int:
        """Ranks are numbered through: one that no stage uses has entries of its own."""
        return 1 + max(rank for ranks in self.ranks for rank in ranks)

    def to_json(self) -> str:
        """Indented JSON, one field a line; `from_json` gives an equal plan.

        Raises:
            PlanError: a number is NaN or infinite, or the plan is nonsense (see `validate`).
        """
        validate(self, "plan")
        data = encode(self)
        return dumps(data | {"seal": seal_of(data)})

    @staticmethod
    def from_json(text: str | bytes, where: str = "plan.json") -> Plan:
        """Read a plan that somebody may have edited.

        Raises:
            PlanError: not strict JSON, another schema, wrong types, or nonsense; `where` is the
                place in the file, like ``plan.json: stages[1].ops[3]``.
        """
        wanted = "give a plan.json, as `pdcompile plan TARGET -o plan.json` writes it"
        data = loads(text, where=where, remedy=wanted)
        schema = data.get("schema", SCHEMA) if isinstance(data, dict) else SCHEMA
        if schema != SCHEMA:
            raise PlanError(
                f"schema {schema!r} is not {SCHEMA!r}",
                where=f"{where}: schema",
                remedy="make the plan again with this version of pdcompile",
            )
        seal = data.pop("seal", None) if isinstance(data, dict) else None
        plan = decode(Plan, data, where=where)
        validate(plan, where)
        check_seal(data, seal, where)
        return plan

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """Read plan.json.  Raises PlanError: there is no such file, or as `from_json`."""
        remedy = (
            "give a plan.json, which `pdcompile plan TARGET -o plan.json` writes, or a folder that "
            "dump wrote"
        )
        with errors_as(PlanError, "cannot read the plan", path, remedy):
            content = read_limited(path)
        return Plan.from_json(content, where=str(path))

    def hash(self) -> str:
        """64 hex digits (SHA-256 of the canonical JSON): equal for equal plans only."""
        return hashlib.sha256(canonical(self)).hexdigest()

    def __str__(self) -> str:
        return self.to_json()


def ranks_of(stages: Sequence[StagePlan]) -> list[tuple[int, ...]]:
    """Ranks of each stage; where a plan names none, they follow each other."""
    found: list[tuple[int, ...]] = []
    following = 0
    for stage in stages:
        found.append(stage.ranks or tuple(range(following, following + stage.replicas)))
        following = max(found[-1]) + 1
    return found
