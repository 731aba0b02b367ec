"""All public names, for type checkers; `__init__.py` reads here where each one is."""

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
from pdcompile.problem.constraints import Pin as Pin
from pdcompile.problem.constraints import Split as Split
from pdcompile.problem.constraints import Together as Together
from pdcompile.reference import reference as reference
from pdcompile.runtime.pipeline import Pipeline as Pipeline
from pdcompile.schedule import Schedule as Schedule
from pdcompile.workload import Workload as Workload
from pdcompile.workload import load_target as load_target

__version__: str
