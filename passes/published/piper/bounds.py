"""Lower bounds that need no states: device-seconds and device-bytes."""

from __future__ import annotations

import math

import numpy as np

from pdcompile.passes.published.piper.model import Floats
from pdcompile.passes.published.piper_model import MenuProblem


def device_seconds(problem: MenuProblem) -> float:
    """A threshold below which K devices cannot hold and compute all nodes; inf: never.

    A stage with load at most T takes d·t ≥ t·Σ seconds/T devices, and d·t ≥ t·Σ bytes/limit ones
    (d ≥ 1; at least one microbatch is in flight).  So K ≥ Σ over the nodes of the least, over
    degrees and variants, of t·(α·seconds/T + (1 − α)·bytes/limit), for every α from 0 to 1.
    """
    if any(min(node.variants) > problem.devices for node in problem.nodes):
        return math.inf
    fit = problem.devices * (1 + 1e-9)

    def needs(weight: float, threshold: float) -> float:
        return math.fsum(weighted(problem, weight, threshold))

    if needs(0.0, 1.0) > fit:
        return math.inf
    best = needs(1.0, 1.0) / fit
    for weight in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        # Twice the bound so far, until it is no bound; then halve the interval.
        low, high = best, best
        while high > 0 and needs(weight, high) > fit and high < 1e300:
            low, high = high, 2 * high
        if low == high:
            continue
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if needs(weight, middle) > fit else (low, middle)
        best = max(best, low)
    return best


def weighted(problem: MenuProblem, weight: float, threshold: float) -> Floats:
    """[node] the least of t·(weight·seconds/threshold + (1 − weight)·bytes/limit)."""
    found = np.zeros(len(problem.nodes))
    for v, node in enumerate(problem.nodes):
        found[v] = min(
            degree
            * (
                weight * variant.seconds / threshold
                + (1 - weight) * (variant.moving_bytes + variant.fixed_bytes) / problem.memory_bytes
            )
            for degree, variants in node.variants.items()
            if degree <= problem.devices
            for variant in variants
        )
    return found


def alone(problem: MenuProblem) -> tuple[int, float] | None:
    """The node that needs most bytes by itself, and how many, if that is above the limit."""
    worst: tuple[int, float] | None = None
    for v, node in enumerate(problem.nodes):
        least = min(
            (
                variant.moving_bytes + variant.fixed_bytes
                for degree, variants in node.variants.items()
                if degree <= problem.devices
                for variant in variants
            ),
            default=math.inf,
        )
        if least > problem.memory_bytes and (worst is None or least > worst[1]):
            worst = (v, least)
    return worst
