"""Models that the benchmarks of forecasts share, at sizes where a stage takes milliseconds.

Architectures as they are published, from small random configurations: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 2048


@dataclass(frozen=True, slots=True)
class Sample:
    """A model in train mode and one microbatch for it; without `loss_fn` it returns its loss."""

    model: nn.Module
    inputs: Any
    target: Any = None
    loss_fn: Callable[..., Tensor] | None = None


def tokens(b: int, length: int) -> Tensor:
    """(b, length) token ids."""
    return torch.randint(3, VOCAB, (b, length))


def gpt2(b: int = 2) -> Sample:
    """GPT-2, 6 layers of 384, 64 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=6,
        n_embd=384,
        n_head=6,
        vocab_size=VOCAB,
        n_positions=64,
        use_cache=False,
    )
    ids = tokens(b, 64)
    return Sample(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


def llama(b: int = 2) -> Sample:
    """Llama, 6 layers of 384, 64 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=384, intermediate_size=1024, num_attention_heads=6,
        num_key_value_heads=3, vocab_size=VOCAB, use_cache=False,
    )  # fmt: skip
    ids = tokens(b, 64)
    return Sample(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


def bert(b: int = 2) -> Sample:
    """BERT, 6 layers of 384, 64 tokens, with padding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=6, hidden_size=384, intermediate_size=1536, num_attention_heads=6,
        vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    ids, mask = tokens(b, 64), torch.ones(b, 64, dtype=torch.long)
    mask[-1, 50:] = 0
    return Sample(
        BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}
    )


def t5(b: int = 2) -> Sample:
    """T5, 3 + 3 layers of 384, 64 tokens in and 48 out."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=3, num_decoder_layers=3, d_model=384, d_ff=1024, num_heads=6, d_kv=64,
        vocab_size=VOCAB, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return Sample(
        T5ForConditionalGeneration(config), {"input_ids": tokens(b, 64), "labels": tokens(b, 48)}
    )


def resnet50(b: int = 2) -> Sample:
    """ResNet-50 on images of 96 x 96."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=100))
    images = torch.randn(b, 3, 96, 96)
    return Sample(model, {"pixel_values": images, "labels": torch.randint(100, (b,))})


def mixtral(b: int = 4) -> Sample:
    """Mixtral, 4 layers of 256 with 8 experts, 64 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, num_local_experts=8, num_experts_per_tok=2,
        use_cache=False,
    )  # fmt: skip
    ids = tokens(b, 64)
    return Sample(MixtralForCausalLM(config), {"input_ids": ids, "labels": ids})


class UNet(nn.Module):
    """(b, 3, s, s) -> (b, 3, s, s), s a multiple of 8; every level skips to the other side."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(
            _block(before, after) for before, after in zip([3, *sizes], sizes, strict=False)
        )
        self.up = nn.ModuleList(_block(3 * size, size) for size in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = block(torch.cat([kept.pop(), F.interpolate(x, scale_factor=2.0)], dim=1))
        out: Tensor = self.head(x)
        return out


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def unet(b: int = 4) -> Sample:
    """A U-Net of 4 levels, 32 to 256 channels, images of 64 x 64."""
    return Sample(UNet(), torch.randn(b, 3, 64, 64), torch.randn(b, 3, 64, 64), F.mse_loss)


class LSTMStack(nn.Module):
    """Token ids (b, s) -> logits (b, s, vocab) by LSTM layers with residuals, as in GNMT."""

    def __init__(self, layers: int = 6, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(self.drop(x))[0]
        logits: Tensor = self.head(x)
        return logits


def lstm(b: int = 8) -> Sample:
    """LSTM layers, 6 of 256, 48 steps."""
    return Sample(LSTMStack(), tokens(b, 48), tokens(b, 48), token_loss)


def mlp(b: int = 64) -> Sample:
    """Linear layers, 8 of 1024."""
    layers = [part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    return Sample(
        nn.Sequential(*layers[:-1]), torch.randn(b, 1024), torch.randn(b, 1024), F.mse_loss
    )


def vit(b: int = 2) -> Sample:
    """ViT, 6 layers of 384, images of 80 x 80 in patches of 8."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=6, hidden_size=384, intermediate_size=1536, num_attention_heads=6,
        image_size=80, patch_size=8, num_labels=100,
    )  # fmt: skip
    images = torch.randn(b, 3, 80, 80)
    return Sample(
        ViTForImageClassification(config),
        {"pixel_values": images, "labels": torch.randint(100, (b,))},
    )


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Block(nn.Module):
    """(b, s, width) -> the same: a pre-norm transformer block.

    `matrices`: all its parameters are matrices, without biases and weights of norms.
    """

    def __init__(self, width: int, heads: int, *, matrices: bool = False) -> None:
        super().__init__()
        self.heads = heads
        norm = partial(nn.LayerNorm, width, elementwise_affine=not matrices)
        linear = partial(nn.Linear, bias=not matrices)
        self.ln_1 = norm()
        self.qkv = linear(width, 3 * width)
        self.proj = linear(width, width)
        self.ln_2 = norm()
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        parts = self.qkv(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, s, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.ln_2(x))))
        return out


def gpt_chain(b: int = 64, *, tied: bool = False) -> Sample:
    """A GPT, 8 blocks of 192, 128 tokens, with an untied head."""
    width, vocab = 192, 256
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab, bias=False))
    embedding = nn.Embedding(vocab, width)
    if tied:
        head[1].weight = embedding.weight
    chain = nn.Sequential(embedding, *(Block(width, 4) for _ in range(8)), head)
    ids = torch.randint(vocab, (b, 129))
    return Sample(chain, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), token_loss)


def vgg_chain(b: int = 512) -> Sample:
    """Convolutions in the manner of VGG on images of 32 x 32, and wide dense layers."""
    sizes, layers = (32, 32, 64, 64, 128, 128), []
    for n, (before, after) in enumerate(zip((3, *sizes), sizes, strict=False)):
        conv = [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers.append(nn.Sequential(*conv, *([nn.MaxPool2d(2)] if n % 2 else [])))
    dense = [nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(2)]
    chain = nn.Sequential(*layers, nn.Flatten(), *dense, nn.Linear(2048, 10))
    return Sample(chain, torch.randn(b, 3, 32, 32), torch.randint(10, (b,)), F.cross_entropy)


def mlp_chain(b: int = 4096, *, layers: int = 16, width: int = 1024) -> Sample:
    """A wide MLP, 16 layers of 1024."""
    chain = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    return Sample(nn.Sequential(*chain), torch.randn(b, width), torch.randn(b, width), F.mse_loss)


MODELS: dict[str, Callable[[], Sample]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet50": resnet50,
    "unet": unet,
    "lstm": lstm,
    "mixtral": mixtral,
    "mlp": mlp,
}


class Features(nn.Module):
    """Images -> (b, width): the parameters of convolutions, which compute nothing here.

    `forward_seconds` and `backward_seconds` are what they took for a sample on a V100, by the
    profiles that PipeDream published.
    """

    def __init__(
        self,
        width: int,
        shapes: list[tuple[int, int, int]],
        forward_seconds: float,
        backward_seconds: float,
    ) -> None:
        super().__init__()
        self.width = width
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.kernels = nn.ParameterList(
            0.01 * torch.randn(outputs, inputs, size, size) for outputs, inputs, size in shapes
        )
        self.biases = nn.ParameterList(torch.zeros(outputs) for outputs, _, _ in shapes)

    def forward(self, images: Tensor) -> Tensor:
        return images.new_zeros(images.shape[0], self.width)


def _dense(features: Features, b: int) -> Sample:
    sizes = (features.width, 4096, 4096)
    dense = [
        nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()) for inputs, outputs in pairwise(sizes)
    ]
    chain = nn.Sequential(features, *dense, nn.Linear(4096, 1000))
    return Sample(chain, torch.randn(b, 3), torch.randint(1000, (b,)), F.cross_entropy)


def vgg16_dense(b: int = 64) -> Sample:
    """VGG-16: its three dense layers, and the parameters of its convolutions."""
    widths = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    shapes = [(after, before, 3) for before, after in pairwise(widths)]
    return _dense(Features(25088, shapes, 1.8e-3, 3.4e-3), b)


def alexnet_dense(b: int = 64) -> Sample:
    """AlexNet: its three dense layers, and the parameters of its convolutions."""
    shapes = [(64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3)]
    return _dense(Features(9216, shapes, 0.16e-3, 0.14e-3), b)


#: models that are one nn.Sequential, which torch's own pipelines can cut; a batch is a minibatch
CHAINS: dict[str, Callable[..., Sample]] = {
    "GPT": gpt_chain,
    "VGG-like": vgg_chain,
    "wide MLP": mlp_chain,
    "VGG-16": vgg16_dense,
    "AlexNet": alexnet_dense,
}


def sample(name: str) -> Sample:
    """A model of `MODELS` with weights and data from seed 0, in train mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = MODELS[name]()
    found.model.train()
    return found
