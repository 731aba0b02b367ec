"""Plan: stages, schedule parameters, forecast and certificate; strict JSON that people edit."""

from pdcompile.plan.check import check as check
from pdcompile.plan.model import SCHEMA as SCHEMA
from pdcompile.plan.model import Certificate as Certificate
from pdcompile.plan.model import Edge as Edge
from pdcompile.plan.model import Forecast as Forecast
from pdcompile.plan.model import MemoryLedger as MemoryLedger
from pdcompile.plan.model import Plan as Plan
from pdcompile.plan.model import StagePlan as StagePlan
from pdcompile.plan.model import TiedParameter as TiedParameter
from pdcompile.plan.model import Training as Training
