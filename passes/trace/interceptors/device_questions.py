"""What forward asks of the device of its tensors, where that is a GPU in the capture alone.

The capture of a model on the CPU for GPUs has the answers of a GPU, which are those of its stages;
the model itself, run on the CPU to be compared with them, gets others: the lines are noted.
"""

from __future__ import annotations

import linecache
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pdcompile.hardware import devices
from pdcompile.passes.trace import refusals
from pdcompile.passes.trace.tape.interceptor import Interceptor, patched
from pdcompile.passes.trace.tape.observer import is_user, source_of_line
from pdcompile.releases.torch_internals import FakeTensor

_COMPARES = re.compile(r"\.device\b.*(==|!=|\bin\b)|(==|!=).*\.device\b")


class DeviceQuestions(Interceptor):
    """Notes ``x.is_cuda``, ``x.device == …`` and regions of the CPU, each with its line."""

    def around(self) -> AbstractContextManager[None]:
        fakes, autocast = self.tape.fakes, torch.autocast
        if fakes.home == fakes.device:
            return nullcontext()
        asked: Any = FakeTensor.device  # a property of Python, of which `asked` hears nothing
        enter: Any = autocast.__enter__

        def device(tensor: FakeTensor) -> Any:
            self._note(refusals.ASKS_DEVICE, _COMPARES)
            return asked.fget(tensor)

        def entered(region: Any) -> Any:
            if region.device == devices.HOST.type:
                self._note(refusals.REGION_OF_HOST)
            return enter(region)

        return patched((FakeTensor, "device", property(device)), (autocast, "__enter__", entered))

    def asked(self, tensor: Any, name: str) -> None:
        """Called where a property of a tensor is read."""
        if name in ("is_cuda", "is_cpu") and self.tape.fakes.home != self.tape.fakes.device:
            self.tape.fakes.findings.of_device.setdefault(self.tape.where(), refusals.ASKS_DEVICE)

    def _note(self, why: refusals.Refusal, line: re.Pattern[str] | None = None) -> None:
        """Notes the line that called the caller, where it is the user's and is like `line`."""
        frame = sys._getframe(2)
        file = frame.f_code.co_filename
        if is_user(file) and (line is None or line.search(linecache.getline(file, frame.f_lineno))):
            where = source_of_line(file, frame.f_lineno)
            self.tape.fakes.findings.of_device.setdefault(where, why)
