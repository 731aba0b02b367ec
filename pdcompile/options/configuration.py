"""Options resolved against machines and minibatch before any pass runs, and the search space."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from pdcompile.cluster import GPU_KIND, HOST_KIND, Cluster
from pdcompile.clusters import cluster_of
from pdcompile.eager.autocast import autocast_text
from pdcompile.eager.loss_scale import scaler_of
from pdcompile.errors import ClusterError, ConfigError, LaunchError
from pdcompile.ir.graph import SizeRange
from pdcompile.options import Options
from pdcompile.options.chosen_schedule import (
    chosen_schedule,
    counts_of,
    microbatches_of,
    updates_each,
)
from pdcompile.options.values import SEARCHED
from pdcompile.plan import Plan, Training
from pdcompile.problem.space import SearchSpace
from pdcompile.schedule.registry import (
    DEFAULT,
    KINDS,
    ScheduleKind,
    allowed,
    kind_of,
    several_a_rank,
)
from pdcompile.schedule_limits import elsewhere
from pdcompile.units import parse_bytes

MICROBATCHES_PER_STAGE = 4  # bubble (N−1)/(m+N−1) at most one fifth with m = 4·N
MOST_COUNTS = 8  # microbatch counts that "auto" tries
SENT = ("everything", "all")  # choices of outputs that earlier stages send to the last one
NOT_KEPT = ("none", "evaluation")  # and those without any of training
SPREAD = 4  # from a quarter of the usual count up to one sample a microbatch


@dataclass(frozen=True, slots=True)
class Configuration:
    """Training and machines, with nothing left open but warm-up and the optimizer's memory.

    One stage a device where the planner does not decide that, or the device of each in
    `placement`.
    `idle`: devices may be left out, as there is no process for each.  `outputs_open`: whether
    training keeps its outputs depends on what they take.
    """

    cluster: Cluster
    num_stages: int
    training: Training
    idle: bool = True
    placement: tuple[int, ...] = ()
    outputs_open: bool = False

    @property
    def microbatch_size(self) -> int:
        """The largest one: costs are of this size."""
        return -(-self.training.batch_size // self.training.num_microbatches)


def configure(
    options: Options,
    *,
    batch_size: int,
    splits: bool,
    num_ranks: int | None,
    device: str = HOST_KIND,
) -> Configuration:
    """Resolve the options.

    Args:
        batch_size: samples in the global minibatch.
        splits: False when nothing has a batch dimension (one microbatch).
        num_ranks: processes under torchrun, None in one process.
        device: kind of the device that the model is on, whose autocast region is meant where the
            cluster has no GPUs.

    Raises:
        ConfigError: an option does not fit the minibatch or the machines.
        LaunchError: the number of processes is not the number of stages.
    """
    schedule = chosen_schedule(options)
    stages, cluster = machines(options, num_ranks)
    placement = _placement(options, kind_of(schedule), stages, len(cluster.devices))
    devices, reduction = len(cluster.devices), options.loss_reduction
    training = Training(
        schedule=schedule,
        num_microbatches=_num_microbatches(options, min(stages, devices), batch_size, splits),
        batch_size=batch_size,
        loss_reduction=reduction if isinstance(reduction, str) else "callable",
        autocast=autocast_text(
            options.autocast, device if all(one.on_host for one in cluster.devices) else GPU_KIND
        ),
        max_grad_norm=options.max_grad_norm,
        loss_scaling=scaler_of(options.grad_scaler) is not None,
        seed=options.seed,
        keeps_outputs=options.outputs not in NOT_KEPT,
        sends_outputs=options.outputs in SENT,
        outputs_by_size="outputs" not in options.said,
        linear_lr_scaling=options.linear_lr_scaling,
        updates="home" if options.updates == "home" else "every",
        parts=options.stage_parts,
        split=options.split if options.stage_parts != 1 else "",
        module_splits=options.module_splits if options.stage_parts != 1 else (),
    )
    several = devices > 1 and not (options.alone or cluster.in_process)
    return Configuration(
        cluster, stages, training, num_ranks is None, placement,
        outputs_open=training.outputs_by_size and several,
    )  # fmt: skip


def innermost_devices(options: Options, num_ranks: int | None) -> int:
    """Devices that the innermost level of links joins; 1 where no machines are described."""
    if num_ranks is None and options.cluster == "auto":
        return 1
    return _cluster(options.cluster, num_ranks or 1, in_process=num_ranks is None).levels[0].size


def joined(options: Options, chosen: Configuration, faster: float) -> Configuration:
    """The configuration for whole stages where each rank is one device, as large as all that the
    parts of its stage run on, and so many times as fast as one of several."""
    devices = chosen.cluster.devices
    parts = _parts_of_ranks(options) or (chosen.training.most_parts,) * len(devices)
    devices = tuple(
        one if n == 1 else replace(
            one, speed=faster * one.speed, memory_bytes=one.memory_bytes and n * one.memory_bytes
        )
        for one, n in zip(devices, parts, strict=True)
    )  # fmt: skip
    return replace(
        chosen, cluster=replace(chosen.cluster, devices=devices, parts=None),
        training=replace(chosen.training, parts=1, split="", module_splits=()),
    )  # fmt: skip


def _placement(options: Options, kind: ScheduleKind, stages: int, devices: int) -> tuple[int, ...]:
    """The rank of each stage where ranks hold several; empty where they do not."""
    if kind.placed and options.replicas == "equal":  # how many are on a rank, however many ranks
        return kind.placement(devices * kind.usual, devices)
    places = devices // (kind.width(stages, devices) * _width(options.replicas))
    placed = stages > places or kind.written is not None or kind.dispatched
    return kind.placement(stages, places) if placed else ()


def machines(options: Options, num_ranks: int | None) -> tuple[int, Cluster]:
    """(number of stages, cluster with the user's limit of memory): see `configure`."""
    stages, ranks = _stages_and_ranks(options, num_ranks)
    unlike = _parts_of_ranks(options)
    processes = sum(unlike) if unlike else ranks * cast(int, options.stage_parts)
    cluster = _cluster(options.cluster, processes, in_process=num_ranks is None)
    if cluster.parts is not None:
        raise ClusterError(
            "the cluster has [parts], as plans write them, and options say what parts there are",
            where="cluster",
            remedy=f"leave [parts] out, list all devices, and give parts={cluster.parts.size}",
        )
    cluster = cluster.grouped(unlike or options.stage_parts)
    if options.memory is not None:  # plans and reports then show it
        limit = parse_bytes(options.memory, what="memory")
        limits = (min(limit, one.memory_bytes or limit) for one in cluster.devices)
        pairs = zip(cluster.devices, limits, strict=True)
        cluster = replace(
            cluster, devices=tuple(replace(one, memory_bytes=least) for one, least in pairs)
        )
    recomputation(options, stages)
    kind = kind_of(chosen_schedule(options))
    for message, remedy in elsewhere(kind, cluster.hosts):
        raise ConfigError(message, where="cluster", remedy=remedy)
    # Where the planner decides how many devices a stage has, some may be left.
    fixed = options.plan is not None or options.replicas not in SEARCHED
    there = len(cluster.devices)
    holds = options.replicas != "any" and kind.holds(-(-stages // there))
    crowded = options.replicas in SEARCHED and stages > there and not holds
    if there < ranks or crowded or (fixed and there > ranks):
        on = "" if crowded or ranks == stages else f" on {ranks} ranks"
        remedy = f"give a cluster of {ranks} devices"
        if not on and not kind.written:
            remedy = f"give stages={there} or a cluster of {stages} devices: one stage a device"
            remedy += _several(stages, there)
            remedy += ", with replicas='equal' (--replicas equal)" * (options.replicas == "any")
        elif isinstance(options.replicas, int) and there % stages == 0:
            remedy += f", or replicas={there // stages} (--replicas {there // stages})"
        raise ConfigError(f"{stages} stages{on} on a cluster of {there} devices", remedy=remedy)
    return stages, cluster


def _several(stages: int, there: int) -> str:
    """One more remedy: several devices a stage, or several stages a device."""
    if stages <= there:
        return "; replicas='any' (--replicas any) gives a stage several devices where it helps"
    whole, odd = divmod(stages, there)
    each = f"a multiple of {there} stages runs" if odd else f"{whole} stages on each run"
    return f"; {each} under schedule {several_a_rank(max(2, whole))}"


def recomputation(options: Options, stages: int) -> tuple[bool, ...] | None:
    """Recomputation of each stage; None where the planner decides.

    Raises:
        ConfigError: it is given for another number of stages.
    """
    given = options.recompute
    if isinstance(given, str):  # "auto"
        return None
    if isinstance(given, bool):
        return (given,) * stages
    if len(given) != stages:
        message = f"stages: {stages}, but recompute={tuple(given)} has {len(given)} of them"
        remedy = f"a bool for each stage, one for all (True or False), or stages={len(given)}"
        raise ConfigError(message, remedy=remedy)
    return tuple(given)


def _parts_of_ranks(options: Options) -> tuple[int, ...]:
    """The parts of the stage of each rank, where stages have unlike numbers of them; else ().

    Raises:
        ConfigError: ranks are not given, or several stages share one.
    """
    parts, replicas = options.stage_parts, options.replicas
    if isinstance(parts, int):
        return ()
    kind = kind_of(chosen_schedule(options))
    remedy = f"one number for all stages: parts={max(parts)}"
    counts = (replicas,) * len(parts) if isinstance(replicas, int) else replicas
    if isinstance(counts, str):
        message = f"replicas={replicas!r} leaves to the planner how many ranks each stage has"
        remedy = f"replicas=1, or those of each stage; or {remedy}"
    elif not len(parts) == len(counts) == (options.stages or len(parts)):
        message, remedy = "that is not the number of stages", "one number of parts for each stage"
    elif kind.written is not None or kind.usual > 1:
        message = f"schedule={kind.name!r} has several stages on a rank"
        remedy = f"{remedy}; or a schedule with one stage a rank, such as {DEFAULT!r}"
    else:
        return tuple(p for p, n in zip(parts, counts, strict=True) for _ in range(n))
    raise ConfigError(f"parts={parts}, and {message}", where="parts", remedy=remedy)


def _stages_and_ranks(options: Options, num_ranks: int | None) -> tuple[int, int]:
    """(stages, ranks); where the planner decides, as many as there can be.  The parts of a stage
    count as one rank."""
    stages, replicas, plan = options.stages, options.replicas, options.plan
    parts = options.stage_parts
    if isinstance(plan, Plan):
        return stages or len(plan.stages), plan.num_ranks
    if unlike := _parts_of_ranks(options):
        if num_ranks not in (None, sum(unlike)):
            raise LaunchError(
                f"stages of {parts} parts take {sum(unlike)} ranks, but WORLD_SIZE is {num_ranks}",
                remedy=f"launch with torchrun --nproc-per-node={sum(unlike)}, or other parts=",
            )
        return len(cast(tuple[int, ...], parts)), len(unlike)
    assert isinstance(parts, int)
    processes = num_ranks  # each computes one part of a stage
    if num_ranks is not None and stages is None and num_ranks % parts:
        message = f"stages of {parts} parts each, but WORLD_SIZE is {num_ranks}"
        remedy = f"launch with a multiple of {parts} processes, or parts= a divisor of {num_ranks}"
        raise LaunchError(message, remedy=remedy)
    num_ranks = there = None if num_ranks is None else num_ranks // parts
    if there is None and options.cluster != "auto":
        there = len(_cluster(options.cluster, 1, in_process=True).devices) // parts
    if isinstance(replicas, tuple):
        if stages not in (None, len(replicas)):
            message = f"stages={stages}, and replicas={replicas} are of {len(replicas)} stages"
            raise ConfigError(message, remedy="leave stages out, or give one count a stage")
        stages = len(replicas)
    dealt = _dealt(options, stages, there)
    if dealt is not None:
        stages, ranks = dealt
    elif isinstance(replicas, tuple):
        ranks = sum(replicas)
    elif isinstance(replicas, int) and replicas > 1:
        stages = stages or (there or replicas) // replicas or 1
        ranks = stages * replicas
    else:
        ranks = there if there and replicas in SEARCHED else stages or there or 1
        stages = stages or ranks
    assert stages is not None
    if num_ranks is not None and processes != ranks * parts:
        shown = f"{stages} stages" + (f" on {ranks} ranks" if ranks != stages else "")
        shown += f" of {parts} parts" * (parts > 1)
        remedy = f"launch with torchrun --nproc-per-node={ranks * parts}"
        if processes == num_ranks * parts:  # else no number of stages would do
            fixed = options.replicas not in (1, *SEARCHED)
            named = ["stages"] * (not fixed or options.stages is not None) + ["replicas"] * fixed
            if not kind_of(chosen_schedule(options)).written:
                remedy += f", or leave {' and '.join(named)} out"
            remedy += _several(stages, num_ranks) if ranks == stages else ""
        raise LaunchError(f"{shown}, but WORLD_SIZE is {processes}", remedy=remedy)
    return stages, ranks


def _dealt(options: Options, stages: int | None, there: int | None) -> tuple[int, int] | None:
    """(stages, ranks) where the schedule may have several stages on a rank and they fit.

    Without replicas as many stages as ranks, or a multiple of them; of equal replicas so many
    places as there are ranks for each take turns.
    """
    kind, width = kind_of(chosen_schedule(options)), _width(options.replicas)
    if kind.written is not None:
        return len(kind.written.placement), len(kind.written.rows)
    if kind.dispatched:  # one stage more than ranks keeps these busy
        ranks = there or max((stages or 2) - 1, 1)
        return stages or ranks + 1, ranks
    if not kind.several or options.replicas == "any" or len({*counts_of(options)}) > 1:
        return None
    if there is None and stages is not None and stages % kind.usual:
        raise ConfigError(
            f"{stages} stages under schedule={kind.name!r}, which has {kind.usual} on a rank "
            "where no cluster says otherwise",
            remedy=f"a multiple of {kind.usual} stages, or cluster=Cluster.local({stages * width})",
        )
    equal = options.replicas == "equal"
    if equal and not kind.placed:
        return None
    ranks = there or (stages or kind.usual) // kind.usual * width
    for each in range(1, ranks + 1) if equal else (width,):
        places = ranks // each
        found: int = stages or places * kind.usual
        if ranks % each == 0 and found % places == 0 and kind.holds(found // places):
            return found, ranks
    return None


def _width(replicas: Any) -> int:
    """Replicas of every stage; 1 where these are not equal, or not known."""
    counts = replicas if isinstance(replicas, tuple) else (replicas,)
    width = counts[0]
    return width if isinstance(width, int) and len({*counts}) == 1 else 1


def _cluster(given: Any, ranks: int, *, in_process: bool) -> Cluster:
    if isinstance(given, Cluster):
        return given
    if given == "auto":
        if in_process:
            return Cluster.local(ranks)
        cluster = Cluster.auto()
        if len(cluster.devices) == ranks:
            return cluster
        return Cluster.auto({"WORLD_SIZE": str(ranks)})  # a group of some ranks: as one host
    return cluster_of(str(given))


def _num_microbatches(options: Options, stages: int, batch_size: int, splits: bool) -> int:
    given = microbatches_of(options)
    if updates_each(options) or (given == "auto" and not splits):
        return 1
    if given == "auto":
        wanted = min(batch_size, MICROBATCHES_PER_STAGE * stages if stages > 1 else 1)
        each = options.stage_parts
        parts = each if isinstance(each, int) else max(each)
        axes = options.split, *(axis for _, axis in options.module_splits)
        if any(a.endswith("samples") for a in axes) and batch_size % parts == 0:  # equal shares
            pieces = batch_size // parts
            return max(m for m in range(1, min(wanted, pieces) + 1) if pieces % m == 0)
        divisor = max(m for m in range(1, wanted + 1) if batch_size % m == 0)
        return divisor if 2 * divisor > wanted else wanted  # uneven is exact, only less regular
    most = max((given, *(options.microbatch_counts or ())))
    if splits and most > batch_size:
        message = f"{most} microbatches of a minibatch of {batch_size} samples"
        remedy = f"microbatches={batch_size}{' or fewer' * (batch_size > 1)}, or a larger minibatch"
        raise ConfigError(message, remedy=remedy)
    return int(given if splits else most)  # several are refused where nothing splits


def search_space(options: Options, configuration: Configuration, sizes: SizeRange) -> SearchSpace:
    """The choices of the planner, for one model on one cluster: often the cut alone.

    Args:
        sizes: microbatch sizes for which the capture is the model.

    Raises:
        ConfigError: no number of microbatches that is asked for can be had.
    """
    schedules: tuple[str, ...] = (configuration.training.schedule,)
    fixed = recomputation(options, configuration.num_stages)
    again = (False, True) if fixed is None else tuple(sorted(set(fixed)))
    mixed = fixed if fixed is not None and len(again) > 1 else ()
    stages, devices = configuration.num_stages, len(configuration.cluster.devices)
    width = kind_of(schedules[0]).width(stages, devices)
    replicas: Any = options.replicas if width == 1 else width
    if isinstance(replicas, int):
        replicas = "1" if replicas == 1 else (replicas,) * stages
    homes: tuple[bool, ...] = (options.updates == "home",)
    if options.updates == "auto" and options.optimizer and replicas != "1":
        homes = (True, False)  # which take no longer come first
    if not options.searches:
        counts = (configuration.training.num_microbatches,)
        return SearchSpace(
            replicas, again, schedules, counts, stages=stages, in_order=True, recomputed=mixed,
            placement=configuration.placement, extra_warmup=options.extra_warmup[:1], homes=homes,
        )  # fmt: skip
    considered: list[str] = []
    if options.schedule == "auto":
        considered = [n for n in allowed(options.max_staleness) if KINDS[n].by_planner]
        schedules = tuple(n for n in considered if KINDS[n].usual == 1)
    placement, given = configuration.placement, options.replicas
    by_planner = given in SEARCHED and not (placement and given == "1")
    space = SearchSpace(
        replicas=replicas,
        recompute=again,
        schedules=schedules,
        microbatches=_counts(options, configuration, sizes),
        extra_warmup=options.extra_warmup,
        stages=len(mixed) or (options.stages if by_planner else stages),
        in_order=bool(placement), recomputed=mixed, idle=configuration.idle, placement=placement,
        homes=homes,
    )  # fmt: skip
    shares = [KINDS[name] for name in considered if KINDS[name].usual > 1 and not mixed]
    several = (_sharing(options, configuration, sizes, kind) for kind in shares)
    return replace(space, sharing=tuple(filter(None, several)))


def _sharing(
    options: Options, configuration: Configuration, sizes: SizeRange, kind: ScheduleKind
) -> SearchSpace | None:
    """The space of a schedule whose ranks hold several stages, as if it had been named: equal
    replicas where any are asked for.  None where there is none with these options."""
    devices = len(configuration.cluster.devices)
    if devices // _width(options.replicas) < 2 or counts_of(options) or options.stages is not None:
        return None
    replicas: Any = {"any": "equal", 1: "1"}.get(options.replicas, options.replicas)
    named = replace(options, schedule=kind.name, replicas=replicas, extra_warmup=(0,))
    dealt = _dealt(named, None, devices)
    if dealt is None:
        return None
    stages, training = dealt[0], replace(configuration.training, schedule=kind.name)
    placement = _placement(named, kind, stages, devices)
    chosen = replace(configuration, num_stages=stages, training=training, placement=placement)
    return search_space(named, chosen, sizes)


def _counts(options: Options, configuration: Configuration, sizes: SizeRange) -> tuple[int, ...]:
    batch, given = configuration.training.batch_size, options.microbatch_counts
    if given is not None:
        held = [m for m in given if sizes.holds_parts(batch, m)]
        if odd := [m for m in given if m not in held]:  # they are too small, or too large
            m, size = odd[0], batch // odd[0]
            reason = sizes.below if size < sizes.smallest else sizes.above
            kept = f"--microbatches {','.join(map(str, held))}, and " if held else ""
            raise ConfigError(
                f"{m} microbatches of {batch} samples have {size} sample{'s' * (size > 1)} each, "
                "for which the model is another graph than for the others; a search is of one"
                + (f": {reason}" if reason else ""),
                where="--microbatches",
                remedy=f"plan apart: {kept}--microbatches {m}; pdcompile diff compares the plans",
            )
        return tuple(dict.fromkeys(given))
    usual = configuration.training.num_microbatches
    if updates_each(options):
        return (1,)
    if microbatches_of(options) != "auto" or options.costs not in ("measured", "estimated"):
        return (usual,)  # a profile is of one size
    near = [
        m
        for m in range(1, batch + 1)
        if m == usual or (batch % m == 0 and usual <= SPREAD * m)
        if sizes.holds_parts(batch, m)
        or (batch == m and sizes.multiple == 1)  # of single samples a capture is made again
    ]
    while len(near) > MOST_COUNTS:  # thin out the side that has more of them
        below = sum(m < usual for m in near)
        near.pop(-2 if below * 2 < len(near) else 1)
    return tuple(sorted(near, key=lambda m: (m != usual, m))) or (usual,)


def capture_size(options: Options, configuration: Configuration) -> int:
    """Samples to capture with: two at least where the number of microbatches is open, since what
    a single sample skips (a copy, an `expand`) makes a graph of its own for it."""
    size, batch = configuration.microbatch_size, configuration.training.batch_size
    counts = options.microbatch_counts
    is_open = options.microbatches == "auto" or (counts is not None and len(counts) > 1)
    if not options.searches or not is_open or updates_each(options):
        return size
    return max(size, min(2, batch // max(1, min(counts or (1,)))))
