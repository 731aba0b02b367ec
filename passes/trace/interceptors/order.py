"""The interceptors in the order in which they are asked: removing one is removing its line."""

from pdcompile.passes.trace.interceptors.checkpoints import Checkpoints
from pdcompile.passes.trace.interceptors.flex_attention import FlexAttention
from pdcompile.passes.trace.interceptors.generators import Generators
from pdcompile.passes.trace.interceptors.module_ops import ArgumentNames, LeafModules, OpaqueCalls
from pdcompile.passes.trace.interceptors.process_state import ProcessState
from pdcompile.passes.trace.interceptors.properties import Properties
from pdcompile.passes.trace.interceptors.python_rng import Arrays, PythonRng
from pdcompile.passes.trace.interceptors.scalars import HandedOutNumbers
from pdcompile.passes.trace.interceptors.tracing_flags import TracingFlags
from pdcompile.passes.trace.interceptors.unchanged import UnchangedTensors
from pdcompile.passes.trace.interceptors.value_reads import ValueReads

INTERCEPTORS = (
    Generators,
    PythonRng,
    FlexAttention,
    Checkpoints,
    OpaqueCalls,
    LeafModules,
    ArgumentNames,
    Properties,
    HandedOutNumbers,
    ValueReads,
    UnchangedTensors,
    Arrays,
    TracingFlags,
    ProcessState,
)
