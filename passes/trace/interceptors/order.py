"""The interceptors in the order in which they are asked: removing one is removing its line."""

from pdcompile.passes.trace.interceptors.checkpoints import Checkpoints
from pdcompile.passes.trace.interceptors.flex_attention import FlexAttention
from pdcompile.passes.trace.interceptors.generators import Arrays, Generators, PythonRng
from pdcompile.passes.trace.interceptors.module_ops import ArgumentNames, LeafModules, OpaqueCalls
from pdcompile.passes.trace.interceptors.process_state import ProcessState, TracingFlags
from pdcompile.passes.trace.interceptors.properties import Properties, UnmovedModules
from pdcompile.passes.trace.interceptors.size_reads import SizeReads
from pdcompile.passes.trace.interceptors.value_reads import ValueReads

INTERCEPTORS = (
    Generators,
    PythonRng,
    FlexAttention,
    Checkpoints,
    OpaqueCalls,
    LeafModules,
    ArgumentNames,
    SizeReads,
    Properties,
    ValueReads,
    UnmovedModules,
    Arrays,
    TracingFlags,
    ProcessState,
)
