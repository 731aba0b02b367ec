"""Casts of a GPU's autocast region, made on the CPU op by op."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pdcompile.releases.gpu_casts import LOW, WIDEST, gpu_casts_on_cpu
from pdcompile.releases.torch_internals import (
    FakeTensorMode,
    fake_gpus_have_gradients,
    gpu_autocast_anywhere,
    kernels_of_region,
)

_X = torch.rand(4, 4) / 2 + 0.25


@pytest.mark.sample(34)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "function",
    [
        *(torch.acos, torch.exp, torch.log1p, torch.rsqrt, torch.reciprocal, F.softplus),
        *(partial(one, dim=-1) for one in (torch.softmax, torch.log_softmax, torch.cumsum)),
        *(torch.sum, torch.prod, torch.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm),
        *(partial(one, dim=0) for one in (torch.sum, torch.norm, torch.logsumexp, torch.mean)),
        *(lambda x: x**2, lambda x: 2**x, lambda x: x**x, lambda x: x + x.float(), F.gelu),
        lambda x: x.sum(0, dtype=torch.float64),
        lambda x: F.softmax(x, -1, dtype=torch.float16),
        *(lambda x: F.layer_norm(x, (4,)), lambda x: F.group_norm(x, 2), F.cosine_similarity),
        *(lambda x: F.rms_norm(x, (4,)), lambda x: F.cross_entropy(x, x.argmax(-1))),
        *(torch.mm, torch.cdist, torch.dist, F.mse_loss, F.linear),
        *(lambda x: torch.addr(x, x[0], x[1]), lambda x: F.prelu(x, x[0])),
        lambda x: torch.einsum("ij,jk->ik", x, x),
        lambda x: torch.mv(x, x[0]),
        *(lambda x: torch.addcmul(x.float(), x, x), lambda x: torch.addcdiv(x, x, x)),
        *(lambda x: torch.atan2(x, x.float()), lambda x: torch.dot(x[0], x[1])),
        lambda x: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.long, device=x.device), x.float()),
        *(lambda x: torch.cat([x, x]), lambda x: torch.stack([x, x]), torch.trace, F.dropout),
        lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
        lambda x: F.conv1d(x[None], x[None]),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    ],
)  # fmt: skip
def test_casts_on_the_cpu_are_those_of_gpus(function: Any, dtype: torch.dtype) -> None:
    x = _X.to(dtype)
    if function is torch.trace and x.dtype == torch.bfloat16 and torch.__version__ < "2.13":
        with pytest.raises(RuntimeError):  # this torch has none on the CPU
            torch.trace(x)
        return
    given = 2 if function in _OF_TWO else 1
    assert fake_gpus_have_gradients()
    with FakeTensorMode(), gpu_autocast_anywhere():
        there = torch.empty(4, 4, dtype=dtype, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            wanted = function(*[there] * given).dtype
    before = torch.exp(x).dtype
    with gpu_casts_on_cpu(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert function(*[x] * given).dtype == wanted
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.exp(x).dtype == before


_OF_TWO = (torch.mm, torch.cdist, torch.dist, F.mse_loss, F.linear, F.cosine_similarity)


def test_all_casts_of_gpus_are_known() -> None:
    """The lists of a new torch may have more ops than are told apart here."""
    there = {name.partition(".")[0] for name in kernels_of_region("cuda")}
    assert there >= LOW - {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert there >= WIDEST
