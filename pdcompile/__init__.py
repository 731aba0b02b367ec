"""pdcompile: an ordinary PyTorch model and your machines in, the fastest pipeline out.

``import pdcompile`` costs no torch.
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

if _TYPE_CHECKING:  # all public names, which `__getattr__` imports when they are first used
    from pdcompile.batch.omitted_output import OmittedOutput as OmittedOutput
    from pdcompile.checkpoint.conversion import load_checkpoint as load_checkpoint
    from pdcompile.cluster import Cluster as Cluster
    from pdcompile.cluster import Device as Device
    from pdcompile.cluster import Level as Level
    from pdcompile.driver import compile as compile
    from pdcompile.errors import CheckpointError as CheckpointError
    from pdcompile.errors import ClosedError as ClosedError
    from pdcompile.errors import ClusterError as ClusterError
    from pdcompile.errors import ConfigError as ConfigError
    from pdcompile.errors import ContractError as ContractError
    from pdcompile.errors import CostError as CostError
    from pdcompile.errors import DeadlockError as DeadlockError
    from pdcompile.errors import InfeasibleError as InfeasibleError
    from pdcompile.errors import InputError as InputError
    from pdcompile.errors import LaunchError as LaunchError
    from pdcompile.errors import NonFiniteError as NonFiniteError
    from pdcompile.errors import NotFoundError as NotFoundError
    from pdcompile.errors import NotPrepared as NotPrepared
    from pdcompile.errors import PdcompileError as PdcompileError
    from pdcompile.errors import PlanError as PlanError
    from pdcompile.errors import RankError as RankError
    from pdcompile.errors import ScheduleError as ScheduleError
    from pdcompile.errors import SourceError as SourceError
    from pdcompile.errors import TraceError as TraceError
    from pdcompile.errors import VerifyError as VerifyError
    from pdcompile.export import export as export
    from pdcompile.ir.graph import OpGraph as OpGraph
    from pdcompile.passes.costs.symbolic import SymbolicCosts as SymbolicCosts
    from pdcompile.passes.costs.symbolic import symbolic_costs as symbolic_costs
    from pdcompile.passes.profile import Profile as Profile
    from pdcompile.passes.trace import trace as trace
    from pdcompile.plan import Certificate as Certificate
    from pdcompile.plan import Plan as Plan
    from pdcompile.problem.constraints import Apart as Apart
    from pdcompile.problem.constraints import CutAt as CutAt
    from pdcompile.problem.constraints import CutBefore as CutBefore
    from pdcompile.problem.constraints import Forbid as Forbid
    from pdcompile.problem.constraints import MaxStages as MaxStages
    from pdcompile.problem.constraints import Pin as Pin
    from pdcompile.problem.constraints import Together as Together
    from pdcompile.reference import reference as reference
    from pdcompile.runtime.pipeline import Pipeline as Pipeline
    from pdcompile.schedule import Schedule as Schedule
    from pdcompile.workload import Workload as Workload
    from pdcompile.workload import load_target as load_target

# The public names of each module, as the imports above have them.
_NAMES = {
    "pdcompile.batch.omitted_output": "OmittedOutput",
    "pdcompile.checkpoint.conversion": "load_checkpoint",
    "pdcompile.cluster": "Cluster Device Level",
    "pdcompile.driver": "compile",
    "pdcompile.errors": (
        "CheckpointError ClosedError ClusterError ConfigError ContractError CostError "
        "DeadlockError InfeasibleError InputError LaunchError NonFiniteError NotFoundError "
        "NotPrepared PdcompileError PlanError RankError ScheduleError SourceError TraceError "
        "VerifyError"
    ),
    "pdcompile.export": "export",
    "pdcompile.ir.graph": "OpGraph",
    "pdcompile.passes.costs.symbolic": "SymbolicCosts symbolic_costs",
    "pdcompile.passes.profile": "Profile",
    "pdcompile.passes.trace": "trace",
    "pdcompile.plan": "Certificate Plan",
    "pdcompile.problem.constraints": "Apart CutAt CutBefore Forbid MaxStages Pin Together",
    "pdcompile.reference": "reference",
    "pdcompile.runtime.pipeline": "Pipeline",
    "pdcompile.schedule": "Schedule",
    "pdcompile.workload": "Workload load_target",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
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
