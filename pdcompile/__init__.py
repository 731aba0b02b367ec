"""pdcompile: an ordinary PyTorch model and your machines in, the fastest pipeline out.

``import pdcompile`` costs no torch.
"""

import re as _re
import sys as _sys
from importlib import import_module as _import_module
from pathlib import Path as _Path
from types import ModuleType as _ModuleType
from typing import Any as _Any

_HERE = _Path(__file__).parent
if not (_HERE / "passes").is_dir():
    raise ImportError(
        "pdcompile/passes is not a folder: the checkout lost its symbolic links; "
        "clone again with: git clone -c core.symlinks=true <url>"
    )

# The module of each public name: `__getattr__` imports it when the name is first used.
_HOME = {
    name: home
    for home, name in _re.findall(
        r"^from (\S+) import (\S+) as", (_HERE / "__init__.pyi").read_text("utf-8"), _re.MULTILINE
    )
}
__all__ = [*_HOME]


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("pdcompile")
        except PackageNotFoundError:  # a folder on sys.path, which nobody has installed
            return "0+source"
    if name not in _HOME:
        raise AttributeError(f"module 'pdcompile' has no attribute {name!r}")
    value = getattr(_import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(_ModuleType):
    """Keeps `pdcompile.reference` the function when the module of that name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
