"""The house holds its order: imports point one way, and the front door is light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import pdcompile

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pdcompile"

# Where a module may import from inside pdcompile.  "data" is every module right under the
# package that is not named here.
DRIVER = {
    *("pdcompile.driver", "pdcompile.user_plans", "pdcompile.planner"),
    "pdcompile.layout_search",
}
# What was compiled goes to the runtime, which knows nothing of who made it.
FRONT = {"pdcompile", "pdcompile.__main__", "pdcompile.compiled", *DRIVER}
TORCH_FREE = {
    "pdcompile",
    "pdcompile.__main__",
    "pdcompile.cluster",
    "pdcompile.clusters",
    "pdcompile.errors",
    "pdcompile.ir.graph",
    "pdcompile.options",
    "pdcompile.plan",
    "pdcompile.problem",
    "pdcompile.schedule",
    "pdcompile.ir.stage_interface",
    "pdcompile.workload",
}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name (passes and runtime through the links)."""
    found = {}
    for top in (PACKAGE, PACKAGE / "passes", PACKAGE / "runtime"):
        for path in top.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@dataclass(frozen=True)
class Import:
    """One name that a statement imports, "" for the module itself."""

    module: str
    name: str
    at_top: bool  # importing the file executes it
    for_types: bool  # only a type checker does

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> list[Import]:
    """Every import of a file, by one look at its statements."""
    found: list[Import] = []

    def visit(node: ast.AST, at_top: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, "", at_top, for_types) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, path  # an absolute name says where a module is
            home = str(node.module)
            found.extend(Import(home, alias.name, at_top, for_types) for alias in node.names)
        at_top = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                of_checker = checked and child in node.body  # type: ignore[attr-defined]
                visit(child, at_top and not of_checker, for_types or of_checker)

    visit(parsed(path), True, False)
    return found


def imported(path: Path, *, top_level: bool = False) -> set[str]:
    """Dotted names that a file imports; `top_level`: only what importing the file executes."""
    found = [one for one in imports_of(path) if one.at_top or not top_level]
    return {one.dotted for one in found} | {one.module for one in found}


def layer(name: str) -> str:
    if name in FRONT:
        return "front"  # knows all
    second = name.split(".")[1]
    return second if second in {"passes", "runtime", "cli", "report"} else "data"


FORBIDDEN = {
    "data": {"pdcompile.passes", "pdcompile.runtime", *DRIVER, "pdcompile.cli"},
    "passes": {"pdcompile.runtime", *DRIVER, "pdcompile.cli"},
    "runtime": {"pdcompile.passes", *DRIVER, "pdcompile.cli"},
    "report": {"pdcompile.runtime", *DRIVER, "pdcompile.cli"},
    "cli": set(),
    "front": set(),
}
# The runtime asks for programs that were proved, and for nothing else of the compiler.
ALLOWED = {"runtime": "pdcompile.passes.check"}


def below(name: str, root: str) -> bool:
    return name == root or name.startswith(root + ".")


def offences(name: str, imports: set[str]) -> list[str]:
    allowed = ALLOWED.get(layer(name))
    found = []
    for other in sorted(imports):
        if allowed and (below(other, allowed) or other == "pdcompile.passes"):
            continue
        if any(below(other, root) for root in FORBIDDEN[layer(name)]):
            found.append(other)
    return found


def test_imports_point_one_way() -> None:
    found = {name: offences(name, imported(path)) for name, path in modules().items()}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_the_layers_are_told_apart() -> None:
    assert offences("pdcompile.plan", {"pdcompile.passes.partition"})
    assert offences("pdcompile.passes.check", {"pdcompile.runtime.pipeline"})
    assert offences("pdcompile.runtime.pipeline", {"pdcompile.passes.partition"})
    assert not offences("pdcompile.runtime.pipeline", {"pdcompile.passes.check.programs"})
    assert not offences("pdcompile.cli.plan", {"pdcompile.driver"})


@pytest.mark.parametrize("name", sorted(TORCH_FREE))
def test_data_modules_do_not_name_torch_at_the_top(name: str) -> None:
    heavy = {i.split(".")[0] for i in imported(modules()[name], top_level=True)}
    assert not heavy & {"torch", "ortools", "sympy", "matplotlib"}


def test_import_pdcompile_is_light() -> None:
    """One process: the front door, every torch-free module, and no torch, ortools or numpy."""
    program = "\n".join(
        [
            "import sys, importlib",
            f"for name in {sorted(TORCH_FREE)}:",
            "    importlib.import_module(name)",
            "heavy = {'torch', 'ortools', 'sympy', 'matplotlib'} & set(sys.modules)",
            "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_type_checkers_see_the_names_that_are_imported_later() -> None:
    """The stub is the list: whatever it names is there."""
    tree = ast.parse((ROOT / "pdcompile/__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == pdcompile._HOME
    assert all(getattr(pdcompile, name).__name__ == name for name in pdcompile.__all__)


def test_one_name_for_one_module() -> None:
    """`import passes` would make a second copy of every class."""
    for name, path in modules().items():
        tops = {other.split(".")[0] for other in imported(path)}
        assert not tops & {"passes", "runtime"}, name


@pytest.mark.parametrize("room", ["pdcompile.passes.costs", "pdcompile.passes.form"])
def test_costs_know_nothing_of_codegen(room: str) -> None:
    """Nor by a detour: when a value dies is decided in the form, which both of them read."""
    known = {name: path for name, path in modules().items() if below(name, "pdcompile.passes")}
    reached = {name for name in known if below(name, room)}
    waiting = list(reached)
    while waiting:
        name = waiting.pop()
        found = {other for other in imported(known[name]) if other in known} - reached
        reached |= found
        waiting += found
    assert not [name for name in reached if below(name, "pdcompile.passes.codegen")]


def runtime_imports(path: Path) -> set[str]:
    """The modules whose names a file takes, not the packages that they are in."""
    known = modules()
    taken = [one for one in imports_of(path) if not one.for_types]
    return {one.dotted if one.dotted in known else one.module for one in taken}
