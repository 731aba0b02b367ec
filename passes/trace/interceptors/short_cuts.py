"""Answers libraries that ask whether they are traced, so that they go where eager goes.

transformers builds a full attention mask when it is traced, and leaves it out where eager finds
nothing masked; attention with fewer key than query heads then runs another kernel, whose gradients
are rounded differently.  A tensor that depends on constants alone can be read while recording, so
the answer for it is no.  For one that depends on the inputs the answer is yes: that general path
holds for all inputs, and is kept unless the capture is found to differ from eager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pdcompile.ir.graph import Ref
from pdcompile.passes.trace.assumptions import Findings
from pdcompile.passes.trace.calls.attribute_reads import answered
from pdcompile.passes.trace.tape.interceptor import Interceptor, patched
from pdcompile.passes.trace.values.constants import evaluate

GENERAL_PATH = (
    "where the model would look into its inputs for a short cut (nothing is masked), the stages "
    "always take the general path: microbatches for which eager takes the short cut may be "
    "rounded differently"
)

ASKED = "transformers.utils.import_utils"
QUESTION = "is_fake_tensor"


class ShortCuts(Interceptor):
    """Makes libraries that ask whether they are traced go where eager goes."""

    def around(self) -> AbstractContextManager[None]:
        tape = self.tape
        always = tape.assumed.short_cuts
        return as_eager(tape.fakes.findings, self._is_constant, tape.training, always=always)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on constants alone, so that its value can be read."""
        tape = self.tape
        name = tape.fakes.name(tensor)
        return isinstance(name, Ref) and evaluate(name.name, tape.ops, tape.fakes) is not None


@contextmanager
def as_eager(
    findings: Findings,
    constant: Callable[[torch.Tensor], bool],
    training: bool = True,
    *,
    always: bool = False,
) -> Iterator[None]:
    """Answers the question while this is open; notes where the answer depends on inputs.

    Args:
        constant: whether a tensor depends on constants alone.
        always: say no for inputs too; the capture then holds for the values of the example.
    """
    module: Any = sys.modules.get(ASKED)
    plain: Any = getattr(module, QUESTION, None)

    def is_fake_tensor(x: Any) -> bool:
        if not plain(x) or constant(x):
            return False
        findings.asked_of_inputs = True
        return not always

    places = () if plain is None else ((module, QUESTION, is_fake_tensor),)
    # Recording has autograd on in both modes, evaluation runs without it.
    with answered(lambda enabled: enabled and training), patched(*places):
        yield
