"""Functions that a user names: ``file.py:function`` or ``package.module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pdcompile.errors import ConfigError, PdcompileError

FORMS = "`file.py:function` or `package.module:function`"


def load_function(target: str) -> Callable[..., Any]:
    """Import the function that ``file.py:function`` or ``package.module:function`` names.

    Raises:
        ConfigError: the text has another form; file, module or function is missing.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(
            f"the target '{target}' has not the form {FORMS}",
            remedy="for example: pdcompile plan examples/gpt.py:build --cluster 1x2",
        )
    module = _load_file(Path(place), target) if is_file(place) else _load_module(place, target)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"there is no function '{name}' in {place}",
            where=target,
            remedy=_suggest(module),
        )
    found: Callable[..., Any] = function
    return found


def is_file(place: str) -> bool:
    """True if the first part of a target names a file, and no module."""
    return place.endswith(".py") or "/" in place or "\\" in place


def _load_file(path: Path, target: str) -> ModuleType:
    if not path.is_file():
        remedy = f"the path is relative to {Path.cwd()}"
        raise ConfigError(f"there is no file '{path}'", where=target, remedy=remedy)
    # Under its plain name, as `import` would see it beside the file: pickles and generated
    # sources refer to its classes by it.
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    name = path.stem if known is None else f"pdcompile_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' is not a Python file", where=target, remedy=f"write {FORMS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with own_errors(f"importing '{path}' failed", target):
            spec.loader.exec_module(module)
    except PdcompileError:
        del sys.modules[name]
        raise
    return module


def _load_module(place: str, target: str) -> ModuleType:
    # The command's own folder is not on the path of an installed script; python -m has it.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with own_errors(f"importing '{place}' failed", target):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            missing = error.name or place
            if place != missing and not place.startswith(missing + "."):
                raise  # something that it imports
            raise ConfigError(
                f"there is no module '{missing}'",
                where=target,
                remedy=f"run in the folder that holds it, install it, or write {FORMS}",
            ) from error


def call(function: Callable[[], Any], target: str) -> Any:
    """Call a target function.  Raises ConfigError: it wants arguments, or raises."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"the target function cannot be called without arguments: {error}",
            where=target,
            remedy="give its parameters defaults, or wrap it in a function without parameters",
        ) from error
    with own_errors("the target function raised", target):
        return function()


@contextmanager
def own_errors(what: str, target: str, remedy: str | None = None) -> Iterator[None]:
    """Raises ConfigError in place of an exception of the user's own code inside, which it quotes
    with the innermost place of it; errors of ours pass."""
    try:
        yield
    except PdcompileError:
        raise
    except Exception as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        where = f"{frame.f_code.co_filename}:{line}"
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{error.filename}:{error.lineno}"
        raise ConfigError(
            f"{what}: {type(error).__name__}: {error}",
            where=where,
            remedy=remedy or f"make `{_python_of(target)}` work first",
        ) from error


def _python_of(target: str) -> str:
    place, _, name = target.rpartition(":")
    if is_file(place):
        path = Path(place)
        return f"cd {path.parent} && python -c 'import {path.stem}; {path.stem}.{name}()'"
    return f"python -c 'import {place} as m; m.{name}()'"


def _suggest(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]
    if not names:
        return f"define one there; a target is {FORMS}"
    return f"it defines: {', '.join(sorted(names)[:12])}"
