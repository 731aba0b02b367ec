"""Holdings: the kinds of tensors that a pipeline holds, and the place of each in a checkpoint."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class HoldingKind(Enum):
    """A kind of tensor: its file among those of its stage, and its key there."""

    WEIGHT = "", "{name}"  # newest value of a parameter or buffer that state dicts have
    OLDER = "-rest", "older/{number}/{name}"  # weights W_number, which a later minibatch runs on
    ACCUMULATED = "-rest", "gradient/{name}"  # sum that waits for the rest of its group
    BUFFER = "-rest", "buffer/{name}"  # one that state dicts leave out, and training writes
    REPLICA = "-replica-{number:03d}", "{name}"  # a buffer of replica `number` alone
    OPTIMIZER = "-optimizer", "{name}"  # of the optimizer's state


class Holding(NamedTuple):
    """A tensor: its kind, its name in the model, and its number where there are several."""

    kind: HoldingKind
    name: str
    number: int = 0

    @property
    def place(self) -> tuple[str, str]:
        """Ending of the file's name (``stage-000`` and this), and key in the file."""
        file, key = self.kind.value
        return file.format(number=self.number), key.format(name=self.name, number=self.number)
