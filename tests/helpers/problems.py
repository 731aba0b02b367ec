"""Partition problems: random small ones with every feature, a GPT, and brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from pdcompile.plan.evaluate import Evaluation
from pdcompile.problem import (
    Holding,
    Item,
    Partition,
    PartitionProblem,
    SharedParameter,
    StageLimits,
    Traffic,
)


def violations(problem: PartitionProblem, stage_of: Sequence[int]) -> list[str]:
    """Constraints that an assignment breaks, in words; empty when it is feasible."""
    return list(Evaluation(problem, stage_of).violations())


def measure(problem: PartitionProblem, stage_of: Sequence[int]) -> Partition:
    """Objective, loads and memory of an assignment, whether it is allowed or not."""
    return Evaluation(problem, stage_of).partition()


def holding(in_flight: Sequence[int], **factors: Any) -> tuple[Holding, ...]:
    """Holdings of stages that save and receive what is in flight; factors are one, or one each."""
    factors = {"saved": in_flight, "received": in_flight} | factors
    rows = {k: v if isinstance(v, Sequence) else [v] * len(in_flight) for k, v in factors.items()}
    return tuple(Holding(**{k: row[s] for k, row in rows.items()}) for s in range(len(in_flight)))


def random_problem(seed: int, max_items: int = 7) -> PartitionProblem:
    """Chains, skips and wild DAGs; unlike stages, memory, pins, shared weights, both objectives."""
    r = random.Random(seed)
    n = r.randint(1, max_items)
    num_stages = r.randint(1, min(3, n))
    kind = r.choice(("chain", "skip", "dag"))
    items = []
    for j in range(n):
        parameters = r.randint(0, 10)
        items.append(
            Item(
                f"item{j}",
                (f"op{j}",),
                r.choice((0, 1, r.random() * 3)),
                r.choice((0, 2, r.random() * 3)),
                parameters,
                r.randint(0, parameters),
                r.randint(0, 5),
                r.randint(0, 5),
            )
        )
    traffic = []
    for j in range(n - 1):
        consumers = tuple(
            c
            for c in range(j + 1, n)
            if (c == j + 1 and kind != "dag") or (kind != "chain" and r.random() < 0.4)
        )
        if consumers:
            back = r.choice((0, r.randint(1, 6)))
            traffic.append(Traffic(f"op{j}", j, consumers, r.randint(0, 6), back))
    tight, duplex = r.random() < 0.3, r.random() < 0.7
    stages = tuple(
        StageLimits(
            r.choice((1.0, 1.0, 2.0)),
            r.randint(20, 150) if tight else None,
            r.choice((float("inf"), 1.0, 5.0, 2.0)),
            duplex,
            r.choice((0.0, 0.0, 0.5)),
        )
        for _ in range(num_stages)
    )
    shared: tuple[SharedParameter, ...] = ()
    if n > 2 and r.random() < 0.4:
        users = tuple(sorted(r.sample(range(n), 2)))
        shared = (SharedParameter("w", r.randint(1, 5), r.random() < 0.7, users),)
    m = r.randint(1, 5)
    in_flight = r.choice(
        (
            (),
            tuple(num_stages - s for s in range(num_stages)),
            (m,) * num_stages,
            tuple(2 * (num_stages - s) - 1 for s in range(num_stages)),
        )
    )
    factors: dict[str, Any] = {
        "versions": r.choice((1, 2)), "optimizer_factor": r.choice((0.0, 2.0, 0.5))
    }  # fmt: skip
    if seed % 3 == 0:  # a schedule whose stages hold unlike numbers of versions
        versions = tuple(num_stages - s for s in range(num_stages))
        factors |= {"versions": versions, "gradient_buffers": versions[::-1]}
    if seed % 2:
        slots = tuple(count + 1 for count in in_flight) or 1
        factors |= {"received": slots, "returned": tuple(min(2, n) for n in in_flight) or 0}
    return PartitionProblem(
        tuple(items),
        tuple(traffic),
        stages,
        shared,
        together=((0, n - 1),) if r.random() < 0.05 and n > 1 else (),
        pins=((r.randrange(n), r.randrange(num_stages)),) if r.random() < 0.2 else (),
        apart=((0, n - 1),) if r.random() < 0.1 and n > 1 else (),
        in_flight=in_flight,
        holdings=holding(in_flight or (1,) * num_stages, **factors),
        num_microbatches=m,
        objective=r.choice(("bottleneck", "flush")),
    )


def brute_force(problem: PartitionProblem) -> float | None:
    """The optimum by trying everything; None when nothing is allowed."""
    best = None
    stages = range(len(problem.stages))
    for stage_of in itertools.product(stages, repeat=len(problem.items)):
        if not violations(problem, stage_of):
            objective = measure(problem, stage_of).objective
            best = objective if best is None else min(best, objective)
    return best


def chain_problem(
    seconds: list[float], num_stages: int, *, size: int = 1, **fields: object
) -> PartitionProblem:
    """Items in a row, forward a third of the seconds each, `size` bytes between neighbours."""
    items = tuple(
        Item(f"layer{i}", (f"op{i}",), own / 3, own * 2 / 3) for i, own in enumerate(seconds)
    )
    traffic = tuple(Traffic(f"op{i}", i, (i + 1,), size, size) for i in range(len(seconds) - 1))
    stages = fields.pop("stages", (StageLimits(),) * num_stages)
    return PartitionProblem(items, traffic, stages, **fields)  # type: ignore[arg-type]


def gpt_problem(
    layers: int, num_stages: int, objective: str = "flush", *, jitter: float = 0.2
) -> PartitionProblem:
    """A tied GPT, five items a layer, costs of a 28M-parameter block on a fast device."""
    r = random.Random(layers)
    items: list[Item] = []
    traffic: list[Traffic] = []
    hidden = 25_000_000

    def item(name: str, seconds: float, parameters: int, saved: int) -> int:
        own = seconds * (1 + jitter * r.random())
        items.append(Item(name, (name,), own, 2 * own, parameters, parameters, saved * hidden))
        return len(items) - 1

    def send(producer: int, *consumers: int) -> None:
        traffic.append(Traffic(items[producer].name, producer, consumers, hidden, hidden))

    last = first = item("wte", 2e-4, 0, 1)
    for i in range(layers):
        norm = item(f"h{i}.ln", 1e-4, 0, 1)
        attention = item(f"h{i}.attn", 2e-3, 8_000_000, 3)
        middle = item(f"h{i}.add", 5e-5, 0, 0)
        mlp = item(f"h{i}.mlp", 2.6e-3, 20_000_000, 5)
        end = item(f"h{i}.add2", 5e-5, 0, 0)
        send(last, norm, middle)
        send(norm, attention)
        send(attention, middle)
        send(middle, mlp, end)
        send(mlp, end)
        last = end
    head, loss = item("head", 6e-3, 0, 2), item("loss", 1e-3, 0, 4)
    send(last, head)
    send(head, loss)
    flush = objective == "flush"
    depth = [num_stages - 1 - s for s in range(num_stages)]
    in_flight = tuple(d + 1 if flush else 2 * d + 1 for d in depth)
    return PartitionProblem(
        tuple(items),
        tuple(traffic),
        (StageLimits(bytes_per_second=12.5e9),) * num_stages,
        (SharedParameter("wte.weight", 150_000_000, True, (first, head)),),
        in_flight=in_flight,
        holdings=holding(in_flight, versions=1 if flush else 2),
        num_microbatches=32,
        objective=objective,  # type: ignore[arg-type]
    )


def evaluate(problem: PartitionProblem, stage_of: tuple[int, ...]) -> Partition:
    """Objective, loads and memory of an assignment, which breaks nothing."""
    assert violations(problem, stage_of) == []
    return measure(problem, stage_of)
