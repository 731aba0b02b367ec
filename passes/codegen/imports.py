"""What a generated file imports, and what it needs besides torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from pdcompile.errors import SourceError
from pdcompile.ir.targets import resolve


@dataclass(slots=True)
class Imports:
    """Collects modules and classes while the bodies are written."""

    modules: set[str] = field(default_factory=set)  # math, operator
    functional: bool = False
    classes: dict[tuple[str, str], str] = field(default_factory=dict)  # (module, name) -> here
    kept: set[str] = field(default_factory=set)  # classes of modules that are kept whole

    def function(self, target: str) -> str:
        """The expression of a function target; raises SourceError unless it resolves."""
        resolve(target)
        if target.startswith("torch.nn.functional."):
            self.functional = True
            return f"F.{target.removeprefix('torch.nn.functional.')}"
        if target.startswith("torch."):
            return target
        if target.startswith(("math.", "operator.")):
            self.modules.add(target.partition(".")[0])
            return target
        return f"{self.cls(target.removesuffix('.apply'))}.apply"

    def cls(self, qualified: str) -> str:
        """The expression of a class of the user's, imported by its qualified name."""
        module, name = _split(qualified)
        outer, _, inner = name.partition(".")
        here = self.classes.get((module, outer))
        if here is None:
            used = set(self.classes.values())
            here, count = outer, 0
            while here in used or here in ("torch", "nn", "F", "math", "operator", "draw"):
                count += 1
                here = f"{outer}_{count}"
            self.classes[module, outer] = here
        return f"{here}.{inner}" if inner else here

    @property
    def names(self) -> set[str]:
        """Names that the imports bind."""
        return {"torch", "nn", *self.modules, *self.classes.values()} | (
            {"F"} if self.functional else set()
        )

    @property
    def needs(self) -> list[str]:
        """Qualified names of what does not come with torch."""
        return sorted({f"{module}.{name}" for module, name in self.classes} | self.kept)

    def lines(self, *, torch_used: bool = True) -> list[str]:
        """Import statements, sorted: standard library, torch, the user's."""
        blocks = [
            [f"import {name}" for name in sorted(self.modules)],
            (["import torch"] if torch_used else [])
            + (["import torch.nn.functional as F"] if self.functional else [])
            + ["from torch import nn"],
            [
                f"from {module} import {name}" + (f" as {here}" if here != name else "")
                for (module, name), here in sorted(self.classes.items())
            ],
        ]
        return "\n\n".join("\n".join(block) for block in blocks if block).split("\n")


def _split(qualified: str) -> tuple[str, str]:
    """Module and qualified name within it.  Raises SourceError when it cannot be imported."""
    parts = qualified.split(".")
    if all(part.isidentifier() for part in parts):
        for cut in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:cut])
            if module in sys.modules and hasattr(sys.modules[module], parts[cut]):
                return module, ".".join(parts[cut:])
    raise SourceError(
        f"{qualified!r} cannot be imported by its name",
        remedy="define the class at the top level of an importable module",
    )
