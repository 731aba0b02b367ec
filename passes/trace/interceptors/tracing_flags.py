"""Answer to libraries that ask whether they are traced, so that they go where eager goes.

transformers builds a full attention mask when it is traced, and leaves it out where eager finds
nothing masked; attention with fewer key than query heads then runs another kernel, whose gradients
are rounded differently.  A tensor that depends on constants alone can be read while recording, so
the answer for it is no.  For one that depends on the inputs the answer is yes: that general path
holds for all inputs, and is kept unless the capture is found to differ from eager.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pdcompile.ir.graph import Ref
from pdcompile.passes.trace.attribute_reads import answered
from pdcompile.passes.trace.constants import evaluate
from pdcompile.passes.trace.tape.interceptor import Interceptor, patched

GENERAL_PATH = (
    "where the model would look into its inputs for a short cut (nothing is masked), the stages "
    "always take the general path: microbatches for which eager takes the short cut may be "
    "rounded differently"
)

ASKED = "transformers.utils.import_utils"
QUESTION = "is_fake_tensor"


class TracingFlags(Interceptor):
    """Lets libraries that ask whether they are traced go where eager goes."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Answers the question while this is open; notes where the answer depends on inputs."""
        tape, module = self.tape, sys.modules.get(ASKED)
        plain: Any = getattr(module, QUESTION, None)

        def is_fake_tensor(x: Any) -> bool:
            if not plain(x) or self._is_constant(x):
                return False
            tape.fakes.findings.asked_of_inputs = True
            return not tape.assumed.hides_tracing

        places = () if plain is None else ((module, QUESTION, is_fake_tensor),)
        # Recording has autograd on in both modes, evaluation runs without it.  The tape is no part
        # of the answer: modules of torch that are imported meanwhile keep it for good.
        training = tape.training
        with answered(lambda enabled: enabled and training), patched(*places):
            yield

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on constants alone, so that its value can be read."""
        tape = self.tape
        name = tape.fakes.name(tensor)
        return isinstance(name, Ref) and evaluate(name.name, tape.ops, tape.fakes) is not None
