"""ResNet-50 or VGG-16 of timm, unmodified, tells the direction of stripes.

    pip install timm                 # with a CUDA build of torch
    python examples/vision.py
    torchrun --nproc-per-node=2 examples/vision.py vgg16

timm imports torchvision, which has to come from where torch came from: with torch's CPU build,
`pip install timm --extra-index-url https://download.pytorch.org/whl/cpu`.

The models have their published layers and few channels, so that a step takes milliseconds;
`timm.create_model("resnet50", pretrained=True)` has all.  Batch norm sees one microbatch at a
time, and `pdcompile plan` notes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pdcompile

DIRECTIONS = 4


def batches(batch_size: int = 16, pixels: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy stripes, and the index of their direction."""
    random = torch.Generator().manual_seed(0)
    place = torch.arange(float(pixels))
    while True:
        label = torch.randint(DIRECTIONS, (batch_size,), generator=random)
        angle = (label * torch.pi / DIRECTIONS)[:, None, None]
        along = angle.cos() * place[None, :, None] + angle.sin() * place[None, None, :]
        noise = torch.randn(batch_size, 3, pixels, pixels, generator=random)
        yield torch.sin(0.8 * along)[:, None] + 0.1 * noise, label


def workload(model: nn.Module) -> pdcompile.Workload:
    return pdcompile.Workload(model, next(batches())[0], F.cross_entropy, batches)


def resnet50() -> pdcompile.Workload:
    from timm.models.resnet import Bottleneck, ResNet

    torch.manual_seed(0)
    layers, channels = (3, 4, 6, 3), (8, 16, 24, 32)  # published: (64, 128, 256, 512)
    return workload(ResNet(Bottleneck, layers, num_classes=DIRECTIONS, channels=channels))


def vgg16() -> pdcompile.Workload:
    from timm.models.vgg import VGG

    torch.manual_seed(0)
    blocks = ((2, 8), (2, 16), (3, 24), (3, 32), (3, 32))  # (convolutions, channels)
    layers = [each for count, channels in blocks for each in (*[channels] * count, "M")]
    return workload(VGG(layers, num_classes=DIRECTIONS, norm_layer=nn.BatchNorm2d, mlp_ratio=0.02))


def main(name: str = "resnet50", steps: int = 21) -> None:
    found = {"resnet50": resnet50, "vgg16": vgg16}[name]()
    pipe = pdcompile.compile(
        found.model,
        loss_fn=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        microbatches=2,
    )
    with pipe:
        for step, (images, label) in zip(range(steps), found.stream(), strict=False):
            result = pipe.step(images, target=label)
            if step % 5 == 0 and os.environ.get("RANK", "0") == "0":
                print(f"step {step}: loss {float(result.loss):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
