"""Schedule: what every rank does, in order.  One instruction list, three interpreters.

`passes.check` walks it with tokens, `passes.simulate` with seconds and bytes, the runtime
with tensors.  `registry` lists the schedules that there are.
"""

from pdcompile.schedule.instruction import Action as Action
from pdcompile.schedule.instruction import Instruction as Instruction
from pdcompile.schedule.instruction import Kind as Kind
from pdcompile.schedule.instruction import Phase as Phase
from pdcompile.schedule.program import Schedule as Schedule
