"""pdcompile: an ordinary PyTorch model and your machines in, the fastest pipeline out.

Names are imported when they are first used: ``import pdcompile`` costs no torch.
"""

import sys as _sys
from importlib import import_module as _import_module
from pathlib import Path as _Path
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if not (_Path(__file__).parent / "passes").is_dir():
    raise ImportError(
        "pdcompile/passes is not a folder: the checkout lost its symbolic links; "
        "clone again with: git clone -c core.symlinks=true <url>"
    )

# Public name -> the module that defines it.
_HOME = {
    "compile": "pdcompile.driver",
    "Pipeline": "pdcompile.runtime.pipeline",
    "reference": "pdcompile.reference",
    "trace": "pdcompile.passes.trace",
    "Workload": "pdcompile.workload",
    "load_target": "pdcompile.workload",
    "Cluster": "pdcompile.cluster",
    "Device": "pdcompile.cluster",
    "Level": "pdcompile.cluster",
    "Pin": "pdcompile.problem.constraints",
    "Together": "pdcompile.problem.constraints",
    "Apart": "pdcompile.problem.constraints",
    "CutBefore": "pdcompile.problem.constraints",
    "Forbid": "pdcompile.problem.constraints",
    "MaxStages": "pdcompile.problem.constraints",
    "Profile": "pdcompile.passes.profile",
    "SymbolicCosts": "pdcompile.passes.costs.symbolic",
    "symbolic_costs": "pdcompile.passes.costs.symbolic",
    "OpGraph": "pdcompile.ir.graph",
    "Plan": "pdcompile.plan",
    "Certificate": "pdcompile.plan",
    "Schedule": "pdcompile.schedule",
    "PdcompileError": "pdcompile.errors",
    "ConfigError": "pdcompile.errors",
    "InputError": "pdcompile.errors",
    "TraceError": "pdcompile.errors",
    "VerifyError": "pdcompile.errors",
    "CostError": "pdcompile.errors",
    "ClusterError": "pdcompile.errors",
    "PlanError": "pdcompile.errors",
    "InfeasibleError": "pdcompile.errors",
    "NotFoundError": "pdcompile.errors",
    "ScheduleError": "pdcompile.errors",
    "DeadlockError": "pdcompile.errors",
    "SourceError": "pdcompile.errors",
    "NotPrepared": "pdcompile.errors",
    "ClosedError": "pdcompile.errors",
    "LaunchError": "pdcompile.errors",
    "ContractError": "pdcompile.errors",
    "RankError": "pdcompile.errors",
}

if _TYPE_CHECKING:
    from pdcompile.cluster import Cluster, Device, Level
    from pdcompile.driver import compile
    from pdcompile.errors import (
        ClosedError,
        ClusterError,
        ConfigError,
        ContractError,
        CostError,
        DeadlockError,
        InfeasibleError,
        InputError,
        LaunchError,
        NotFoundError,
        NotPrepared,
        PdcompileError,
        PlanError,
        RankError,
        ScheduleError,
        SourceError,
        TraceError,
        VerifyError,
    )
    from pdcompile.ir.graph import OpGraph
    from pdcompile.passes.costs.symbolic import SymbolicCosts, symbolic_costs
    from pdcompile.passes.profile import Profile
    from pdcompile.passes.trace import trace
    from pdcompile.plan import Certificate, Plan
    from pdcompile.problem.constraints import Apart, CutBefore, Forbid, MaxStages, Pin, Together
    from pdcompile.reference import reference
    from pdcompile.runtime.pipeline import Pipeline
    from pdcompile.schedule import Schedule
    from pdcompile.workload import Workload, load_target

__all__ = [
    "Apart",
    "Certificate",
    "ClosedError",
    "Cluster",
    "ClusterError",
    "ConfigError",
    "ContractError",
    "CostError",
    "CutBefore",
    "DeadlockError",
    "Device",
    "Forbid",
    "InfeasibleError",
    "InputError",
    "LaunchError",
    "Level",
    "MaxStages",
    "NotFoundError",
    "NotPrepared",
    "OpGraph",
    "PdcompileError",
    "Pin",
    "Pipeline",
    "Plan",
    "PlanError",
    "Profile",
    "RankError",
    "Schedule",
    "ScheduleError",
    "SourceError",
    "SymbolicCosts",
    "Together",
    "TraceError",
    "VerifyError",
    "Workload",
    "compile",
    "load_target",
    "reference",
    "symbolic_costs",
    "trace",
]


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("pdcompile")
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
