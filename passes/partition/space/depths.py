"""How deep the warm-up of a stage can be when only the number of ranks behind it is known."""

from __future__ import annotations

from pdcompile.problem.space import Setting
from pdcompile.schedule.registry import kind_of


def least_depth(
    setting: Setting, replicas: int, after: int, ranks: int, straight: bool, guess: int | None
) -> int:
    """At most what `schedules.warmup` gives a stage with `after` ranks behind it.

    w_s·r_s ≥ (w_{s+1} + a)·r_{s+1} ≥ … ≥ a·Σ_{i>s} r_i, with a = 1 + extra.  Where a stream has
    too few microbatches for these depths they are scaled down together, by how much is decided
    by all stages: then 0, or with a `guess` the depth that is likely.
    """
    m, apart = setting.num_microbatches, 1 + setting.extra_warmup
    kind = kind_of(setting.schedule)
    cap = kind.most_warmup(m, replicas)
    if kind.warmup == "all":
        return cap
    depth = -(-apart * after // replicas)
    if not kind.stream:
        return min(depth, cap)
    most = apart * (ranks - 1) if straight else (1 + apart) * ranks
    if m >= most:
        return depth
    return 0 if guess is None else min(depth, cap)


def most_depth(setting: Setting, replicas: int, after: int, straight: bool) -> int:
    """At least what `schedules.warmup` gives: each ⌈…⌉ on the way adds less than 1·r_i."""
    apart = 1 + setting.extra_warmup
    kind = kind_of(setting.schedule)
    cap = kind.most_warmup(setting.num_microbatches, replicas)
    if kind.warmup == "all":
        return cap
    depth = apart * after if straight else ((1 + apart) * after + replicas - 1) // replicas
    return min(depth, cap)
