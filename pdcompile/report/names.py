"""Short names for what a stage holds: ``tokens, blocks.0–2`` instead of thirty parameters."""

from __future__ import annotations

from collections.abc import Sequence


def modules(parameters: Sequence[str], ops: Sequence[str] = ()) -> str:
    """The modules that own the parameters, numbered ones as ranges, in natural order.

    Without parameters, the first and the last op.
    """
    if not parameters:
        return " … ".join(dict.fromkeys((ops[0], ops[-1]))) if ops else "nothing"
    ranges: dict[str, set[int]] = {}
    for name in sorted(parameters):
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            ranges.setdefault(parts[0], set())
        else:
            ranges.setdefault(".".join(parts[:at]), set()).add(int(parts[at]))
    return ", ".join(_ranges(stem, numbers) for stem, numbers in ranges.items())


def _ranges(stem: str, numbers: set[int]) -> str:
    shown = ",".join(ranges(numbers))
    return f"{stem}.{shown}" if stem and shown else stem or shown


def ranges(numbers: set[int]) -> tuple[str, ...]:
    """Runs of consecutive numbers: ``0–2`` and ``5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return tuple(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def ranks(numbers: Sequence[int]) -> str:
    """``0–3``, ``0,2,5``, or ``-`` for none."""
    return _ranges("", set(numbers)) if numbers else "-"
