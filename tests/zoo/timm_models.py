"""timm's vision models, thinned where a constructor argument allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case, Entry, classes, floats
from tests.zoo.torchvision_path import enable

CLASSES = 10


def _named(name: str, pixels: int = 64, label: str = "", **more: Any) -> Entry:
    """``timm.create_model(name)`` on square images of that many pixels."""

    def make(dropout: float) -> nn.Module:
        import timm

        for key in ("drop_rate", "drop_path_rate"):
            more.setdefault(key, dropout)
        given = {k: v for k, v in more.items() if v is not None}
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **given)
        return model

    return _entry(label or name, make, pixels)


def _entry(name: str, make: Callable[[float], nn.Module], pixels: int) -> Entry:
    def build(dropout: float) -> Case:
        enable()
        return Case(
            model=make(dropout),
            inputs=lambda step: (floats(step, 3, pixels, pixels),),
            loss_fn=F.cross_entropy,
            target=lambda step: classes(step, CLASSES),
        )

    return Entry(f"timm_{name}", "timm", build, "timm")


def _resnet50(dropout: float) -> nn.Module:
    from timm.models.resnet import Bottleneck, ResNet

    return ResNet(
        Bottleneck,
        layers=(3, 4, 6, 3),
        channels=(8, 16, 24, 32),
        num_classes=CLASSES,
        drop_rate=dropout,
    )


def _vgg(dropout: float) -> nn.Module:
    from timm.models.vgg import VGG

    return VGG(
        [8, "M", 16, "M", 24, 24, "M", 32, 32, "M", 32, 32, "M"],
        num_classes=CLASSES,
        norm_layer=nn.BatchNorm2d,
        drop_rate=dropout,
        mlp_ratio=0.02,
    )


def _nfnet(dropout: float) -> nn.Module:
    from timm.models.nfnet import NfCfg, NormFreeNet

    config = NfCfg(
        depths=(1, 1, 2, 1),
        channels=(16, 32, 48, 64),
        stem_type="deep_quad",
        stem_chs=16,
        group_size=8,
        bottle_ratio=0.5,
        attn_layer="se",
        attn_kwargs={},
        num_features=64,
    )
    return NormFreeNet(config, num_classes=CLASSES, drop_rate=dropout, drop_path_rate=dropout)


def _mixer(dropout: float, **more: Any) -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(
        num_classes=CLASSES,
        img_size=64,
        patch_size=16,
        num_blocks=2,
        embed_dim=48,
        drop_rate=dropout,
        drop_path_rate=dropout,
        **more,
    )


def _gmlp(dropout: float) -> nn.Module:
    from timm.layers import GatedMlp
    from timm.models.mlp_mixer import SpatialGatingBlock

    return _mixer(dropout, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp, mlp_ratio=6)


def _focalnet(dropout: float) -> nn.Module:
    from timm.models.focalnet import FocalNet

    return FocalNet(
        num_classes=CLASSES,
        depths=(1, 1, 2, 1),
        embed_dim=16,
        focal_levels=(2, 2, 2, 2),
        drop_rate=dropout,
        proj_drop_rate=dropout,
        drop_path_rate=dropout,
    )


def _poolformer(dropout: float) -> nn.Module:
    from timm.models.metaformer import MetaFormer

    return MetaFormer(
        depths=(1, 1, 1, 1),
        dims=(16, 24, 32, 48),
        num_classes=CLASSES,
        drop_rate=dropout,
        proj_drop_rate=dropout,
        drop_path_rate=dropout,
    )


ENTRIES: tuple[Entry, ...] = (
    _entry("resnet50", _resnet50, 64),
    _entry("vgg11_bn", _vgg, 64),
    _entry("nfnet", _nfnet, 64),
    _named("efficientnet_b0"),
    _named("mobilenetv3_small_050", drop_path_rate=0.1),
    _named(
        "vit_tiny_patch16_224", 32, img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4
    ),
    _named(
        "swin_tiny_patch4_window7_224",
        64,
        img_size=64,
        embed_dim=16,
        depths=(1, 2, 1),
        num_heads=(2, 2, 4),
        window_size=4,
    ),
    _named("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    _named("regnety_002"),
    _entry("mixer", _mixer, 64),
    _named("densenet121", growth_rate=8, block_config=(2, 2, 3, 2), drop_path_rate=None),
    _named("inception_v3", 96, drop_path_rate=None),
    _named(
        "coatnet_nano_cc_224",
        64,
        img_size=64,
        embed_dim=(16, 32, 48, 64),
        depths=(1, 1, 1, 1),
        stem_width=(8, 16),
    ),
    _named("ghostnet_050", drop_path_rate=None),
    _named("mobilevit_xxs"),
    _entry("poolformer", _poolformer, 64),
    _named(
        "levit_128s", 224, embed_dim=(32, 48, 64), depth=(1, 1, 1), num_heads=(2, 2, 2), key_dim=8
    ),
    _named("pvt_v2_b0"),
    _named("xcit_nano_12_p16_224", 64, img_size=64, embed_dim=32, depth=2, num_heads=4),
    _named("cait_xxs24_224", 64, img_size=64, embed_dim=32, depth=2, num_heads=4),
    _named("res2net50_26w_4s", layers=(1, 1, 1, 1), base_width=8),
    _named("repvgg_a0"),
    _entry("gmlp", _gmlp, 64),
    _entry("focalnet", _focalnet, 64),
    _named("dla34", drop_path_rate=None),
    _named("edgenext_xx_small"),
)
