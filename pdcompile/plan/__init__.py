"""Plan: stages, schedule parameters, forecast and certificate; strict JSON that people edit."""

from pdcompile.plan.schema import NOT_CERTIFIED as NOT_CERTIFIED
from pdcompile.plan.schema import SCHEMA as SCHEMA
from pdcompile.plan.schema import Alternative as Alternative
from pdcompile.plan.schema import Certificate as Certificate
from pdcompile.plan.schema import Edge as Edge
from pdcompile.plan.schema import Forecast as Forecast
from pdcompile.plan.schema import MemoryLedger as MemoryLedger
from pdcompile.plan.schema import Plan as Plan
from pdcompile.plan.schema import StagePlan as StagePlan
from pdcompile.plan.schema import TiedParameter as TiedParameter
from pdcompile.plan.schema import TiedUses as TiedUses
from pdcompile.plan.schema import Training as Training
