"""Local variables of one function body: as few as the model's author used, never too few.

A name may be bound again once the value that it held is not read any more, as in
``x = self.ln(x)``.  Names derived from an op are used once, so that they stay telling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdcompile.passes.stages.naming import RESERVED


@dataclass(slots=True)
class Variables:
    """Assigns names to values by their intervals of life (position made, position last read)."""

    avoid: Iterable[str] = ()
    names: dict[str, str] = field(default_factory=dict)
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def fix(self, value: str, name: str, span: tuple[int, int]) -> None:
        """The value has this name, come what may (arguments)."""
        self.names[value] = name
        self.spans.setdefault(name, []).append(span)

    def give(self, value: str, wish: str, rebind: bool, span: tuple[int, int]) -> str:
        """A name for the value: its wish, or the wish with a number."""
        name, count = wish, 0
        while not self.free(name, rebind, span):
            count += 1
            name = f"{wish}_{count}"
        self.fix(value, name, span)
        return name

    def free(self, name: str, rebind: bool, span: tuple[int, int]) -> bool:
        """Whether no value that lives in this span has the name."""
        if name in RESERVED or name in self.avoid:
            return False
        others = self.spans.get(name, [])
        if not rebind:
            return not others
        return all(span[0] >= end or start >= span[1] for start, end in others)


def lifetimes(
    items: Sequence[tuple[Sequence[str], Sequence[str], Sequence[str]]],
    inputs: Iterable[str],
    outputs: Iterable[str],
) -> dict[str, tuple[int, int]]:
    """From when to when every value is needed.

    Items are (values read, values made, values read after what is made has got its name).
    """
    made: dict[str, int] = dict.fromkeys(inputs, -1)
    read: dict[str, int] = {}
    for position, (reads, makes, rereads) in enumerate(items):
        for name in reads:
            read[name] = position
        for name in rereads:
            read[name] = position + 1
        for name in makes:
            made.setdefault(name, position)
    for name in outputs:
        read[name] = len(items)
    return {name: (start, max(read.get(name, start), start + 1)) for name, start in made.items()}
