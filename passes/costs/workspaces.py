"""Bytes that kernels of a device hold beside operands and results, as far as that is known.

What kernels of CPUs take while they run is in `cpu_kernels`.  On GPUs, cuBLAS has a
workspace for each thread and stream that multiplies matrices; what cuDNN's convolutions take while
they run depends on the algorithm that it chooses, and is tried on the GPU that is here
(`tried_kernels`), or not known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdcompile.cluster import HOST_KIND
from pdcompile.passes.costs.costed_op import CostedOp
from pdcompile.passes.costs.flops import rule_of
from pdcompile.passes.costs.stage_ports import Resident

KIB = 1 << 10
THREADS = 2  # that multiply matrices on a stage's stream: its own, and autograd's of the device
HOPPER = 9  # the generation from which on cuBLAS takes more
OLDER, NEWER = (2 * 4096 + 8 * 16) * KIB, 8 * 4096 * KIB  # torch's choice of a workspace
OF_NEWER = frozenset(("h100", "h200"))
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # by which users choose it: ":KiB:count", several times
_UNLIKE_CUBLAS = ("conv", "lstm", "gru", "rnn", "scaleddot")  # products of other libraries


@dataclass(frozen=True, slots=True)
class Kernels:
    """Needs of kernels of a kind of device: whether convolutions copy, and bytes of cuBLAS.

    `gpu`: the one that is here, with its modes, on which convolutions are tried; "" for none.
    """

    copies: bool = True
    product_bytes: int = 0
    gpu: str = ""

    @staticmethod
    def of(kind: str) -> Kernels:
        """Those of a device of a cluster; where the kind does not tell, of the GPU that is here."""
        if kind == HOST_KIND:
            return HOST
        from pdcompile.hardware import devices

        here = devices.of_kind(kind)
        gpu = "" if devices.is_host(here) else devices.name_and_modes(here)
        chosen = re.findall(r":(\d+):(\d+)", os.environ.get(VARIABLE, ""))
        own = sum(int(size) * int(count) * KIB for size, count in chosen)
        if not chosen:
            is_newer = kind == devices.GPU and gpu and devices.capability(here)[0] >= HOPPER
            own = NEWER if kind in OF_NEWER or is_newer else OLDER
        return Kernels(copies=False, product_bytes=THREADS * own, gpu=gpu)

    @staticmethod
    def of_all(kinds: Iterable[str]) -> Kernels:
        """Those of devices of several kinds: on each rank the most that any of them takes."""
        each = [Kernels.of(kind) for kind in dict.fromkeys(kinds)]
        most = max(each, key=lambda one: one.product_bytes)
        return replace(most, copies=any(one.copies for one in each))

    def beside(self, held: Resident, calls: Iterable[CostedOp]) -> Resident:
        """Bytes that a stage holds, with the workspace of its products while it runs."""
        if not self.product_bytes or not any(map(_multiplies, calls)):
            return held
        first, more = held.first_peak_bytes, self.product_bytes
        part = more if held.split_bytes else 0
        return replace(
            held, workspace_bytes=held.workspace_bytes + more,
            first_peak_bytes=None if first is None else first + more,
            split_workspace_bytes=held.split_workspace_bytes + part,
            split_first_workspace_bytes=held.split_first_workspace_bytes + part,
            forward_workspace_bytes=held.forward_workspace_bytes + more,
        )  # fmt: skip

    def note(self) -> str:
        """Note of a plan about it; "" on CPUs."""
        if self.copies and not self.product_bytes:
            return ""
        return (
            f"workspace on GPUs: {self.product_bytes / (KIB * KIB):.0f} MiB of cuBLAS for each "
            "rank that multiplies matrices are in the forecast (ranks of one process share them); "
            + (
                f"so is what convolutions took that were tried on {self.gpu}"
                if self.gpu
                else "what cuDNN's convolutions take while they run is not known, and not in it"
            )
        )


HOST = Kernels()


def _multiplies(call: CostedOp) -> bool:
    return bool(rule_of(call).product) and not call.name.startswith(_UNLIKE_CUBLAS)
