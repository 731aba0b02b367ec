"""Do stages on GPUs compute what they should?  Over NCCL, over gloo, and beside the reference.

    python benchmarks/gpu_equal.py                              # one process, all stages on one GPU
    torchrun --nproc-per-node=2 benchmarks/gpu_equal.py         # a GPU each; 2, 3 or 4 of them
    PDCOMPILE_SHARE_GPUS=1 torchrun --nproc-per-node=4 benchmarks/gpu_equal.py
    PDCOMPILE_TRANSPORTS="tags ordered" torchrun --nproc-per-node=2 benchmarks/gpu_equal.py \
        --device cpu

On ranks every schedule trains twice, replicas, tied weights and clipping among them, and losses,
outputs, evaluation and the whole state have to be equal to the last bit.  In one process what
changes numbers is tried (autocast, a scaled loss, recomputation, dropout, clipping), and compared
with `pdcompile.reference`; autocast also with a model that is on the CPU until it is placed, whose
capture has to be that of the model on the GPU.  Exit code 1: something differs, or did not run.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # also as `python benchmarks/gpu_equal.py`

import pdcompile  # noqa: E402
from benchmarks.gpu import difference  # noqa: E402
from pdcompile import driver  # noqa: E402
from pdcompile.batch import flatten_call  # noqa: E402
from pdcompile.hardware import devices  # noqa: E402
from pdcompile.options import Options  # noqa: E402
from tests.helpers import models  # noqa: E402
from tests.test_device_order_run import SINGLE, trained  # noqa: E402

TOLERANCE = 1e-6  # of a tensor's largest number, beside the reference
GPT = partial(models.gpt, layers=4, tied=True)
CASES: dict[int, list[tuple[Any, dict[str, Any]]]] = {
    2: [
        (GPT, {"schedule": "1f1b"}),
        (GPT, {"schedule": "2bw"}),
        (models.unet, {"schedule": "gpipe"}),
        (GPT, {"schedule": "zb-h1"}),
        (models.mlp, {"schedule": "interleaved", "stages": 4}),
        (GPT, {"schedule": "zb-v", "stages": 4}),
        (models.unet, {"schedule": "stash", **SINGLE}),
        (GPT, {"schedule": "vsync", "microbatches": 1}),
    ],
    3: [
        (models.convnet, {"schedule": "1f1b", "replicas": (1, 2)}),
        (GPT, {"schedule": "2bw", "replicas": (2, 1)}),
        (models.mlp, {"schedule": "stash", "replicas": (1, 2), **SINGLE}),
    ],
    4: [(GPT, {"schedule": "gpipe", "replicas": 2, "stages": 2})],
}
MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"autocast": "bfloat16"},
    "float16, scaled": {"autocast": "float16"},
    "recomputation": {"recompute": True},
    "dropout": {},
    "clipping": {"max_grad_norm": 0.5},
}


def over_transports(kind: str) -> Iterator[tuple[str, float]]:
    """Table of what was tried, and by how much two ways to send data differ."""
    transports = os.environ.get("PDCOMPILE_TRANSPORTS", "nccl tags").split()
    cluster = pdcompile.Cluster.auto().each(kind=kind)
    for build, options in CASES.get(int(os.environ["WORLD_SIZE"]), CASES[2]):
        found = []
        for transport in transports:
            os.environ["PDCOMPILE_TRANSPORT"] = transport
            given = {"outputs": "all", "cluster": cluster, **options}
            found.append({str(n): one.float() for n, one in enumerate(trained(build, given))})
        model = getattr(build, "func", build).__name__
        yield f"{model}, {options}, {' and '.join(transports)}", difference(*found)


def beside_the_reference(kind: str) -> Iterator[tuple[str, float]]:
    """Table of what was tried, and by how much it differs from plain PyTorch."""
    device = devices.of_kind(kind)
    for mode, options in MODES.items():
        for schedule in ("1f1b", "2bw"):
            torch.manual_seed(0)
            model = GPT(layers=2, dropout=0.1 if mode == "dropout" else 0.0).to(device)
            twin = copy.deepcopy(model)
            x, y = (one.to(device) for one in models.batch_for(model, 8))
            scaled = [
                {"grad_scaler": torch.amp.GradScaler(device.type, init_scale=1024.0)}
                if mode.endswith("scaled") else {}
                for _ in range(2)
            ]  # fmt: skip
            pipe = pdcompile.compile(
                model, (x,), example_target=y, loss_fn=models.loss_for(model), stages=2,
                optimizer=partial(torch.optim.AdamW, lr=1e-3), schedule=schedule, microbatches=4,
                cluster=pdcompile.Cluster.local(2, kind=kind), costs="estimated", progress=False,
                **options, **scaled[0],
            ).prepare()  # fmt: skip
            plain = pdcompile.reference(
                twin, plan=pipe.plan, loss_fn=models.loss_for(model),
                optimizer=partial(torch.optim.AdamW, lr=1e-3), **scaled[1],
            )  # fmt: skip
            for _ in range(6):
                pipe.step(x, target=y)
                plain.step(x, target=y)
            pipe.flush()
            plain.flush()
            yield f"{mode}, {schedule}", difference(pipe.state_dict(), plain.state_dict())
            pipe.close()
            if options.get("autocast") and schedule == "1f1b":
                yield f"{mode}, captured on the CPU", _captured_apart(kind, options)


def _captured_apart(kind: str, options: dict[str, Any]) -> float:
    """0 where a model on the CPU, planned for GPUs, has the graph that it has on the GPU; else
    infinite."""
    captured = []
    for place in (devices.HOST, devices.of_kind(kind)):
        torch.manual_seed(0)
        model = GPT(layers=2).to(place)
        x, y = (one.to(place) for one in models.batch_for(model, 8))
        found = driver.build(
            model, flatten_call(model, (x,), {}, y),
            Options.given({
                "loss_fn": models.loss_for(model), "stages": 2, "microbatches": 4,
                "optimizer": partial(torch.optim.AdamW, lr=1e-3), "costs": "estimated",
                "cluster": pdcompile.Cluster.local(2, kind=kind), "progress": False,
                **options,
            }),
        )  # fmt: skip
        captured.append((found.capture.train, found.capture.eval, found.plan.stages))
    return 0.0 if captured[0] == captured[1] else math.inf


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=(devices.GPU, devices.HOST.type), default=devices.GPU)
    kind = parser.parse_args(arguments).device
    ranks = "WORLD_SIZE" in os.environ
    first, allowed = os.environ.get("RANK", "0") == "0", 0.0 if ranks else TOLERANCE
    wrong = 0
    try:
        for what, found in (over_transports if ranks else beside_the_reference)(kind):
            wrong += not found <= allowed
            if first:
                shown = "equal, every bit" if found == 0 else f"differs by {found:.0e}"
                print(f"{what}: {shown}", flush=True)
    except pdcompile.errors.PdcompileError:
        traceback.print_exc()
        wrong += 1
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
