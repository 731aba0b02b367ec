"""timm's models import torchvision, whose wheel is made for CUDA and breaks a CPU torch.

It therefore lies in a folder of its own that only processes which build timm models put on their
path; its operators are never used, so their missing registrations are replaced by nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

VARIABLE = "PDCOMPILE_TORCHVISION"
DEFAULT = Path(sys.prefix) / "torchvision-apart"


def folder() -> Path:
    """Folder in which torchvision was installed apart (`make venv` does so)."""
    return Path(os.environ.get(VARIABLE) or DEFAULT)


def reason() -> str:
    """Reason why timm cannot be imported here; empty when it can."""
    if importlib.util.find_spec("torchvision") is not None or folder().is_dir():
        return ""
    return f"there is no torchvision in {folder()} (make venv puts it there, or set {VARIABLE})"


def enable() -> None:
    """Let this process import timm.  Never where transformers is used: it would break that."""
    if str(folder()) not in sys.path:
        sys.path.append(str(folder()))
    name = "torchvision._meta_registrations"
    sys.modules.setdefault(name, ModuleType(name))
