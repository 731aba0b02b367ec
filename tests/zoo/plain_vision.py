"""Plain torch on images, and generative models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Entry, classes, floats
from tests.zoo.plain_sequences import entry

FAMILY = "plain vision"


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.down = nn.ModuleList([_conv(3, 8), _conv(8, 16), _conv(16, 24)])
        self.middle = nn.Sequential(_conv(24, 24), nn.Dropout2d(dropout))
        self.up = nn.ModuleList([_conv(48, 16), _conv(32, 8), _conv(16, 8)])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(c, c, 2, stride=2) for c in (24, 16, 8))
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block, grow in zip(self.up, self.grow, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], dim=1))
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, outputs, stride),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.skip(x)
        return F.relu_(out)


class ResNet(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = _conv(3, 8)
        self.layers = nn.Sequential(
            Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1), Residual(16, 32, 2)
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(32, 10)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(image)))


class AlexNet(nn.Sequential):
    def __init__(self, dropout: float) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 5, 2, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.LocalResponseNorm(5),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.AdaptiveMaxPool2d(3),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(216, 64),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64, 10),
        )


class Mixer(nn.Module):
    def __init__(self, dropout: float, width: int = 24, patches: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.tokens = nn.ModuleList(self._mlp(patches, dropout) for _ in range(2))
        self.channels = nn.ModuleList(self._mlp(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _mlp(width: int, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).mT).mT
            x = x + self.channels[i](self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


class Autoencoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(8, 16, 4, 2, 1)
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(8, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class VAE(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(dropout))
        self.mean, self.log_variance = nn.Linear(48, 8), nn.Linear(48, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x.flatten(1))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(z), mean, log_variance


def vae_loss(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    made, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return F.mse_loss(made, x.flatten(1)) + 0.1 * divergence


class VQVAE(nn.Module):
    """Nearest codes with a straight-through gradient."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(dropout))
        self.codes = nn.Embedding(12, 24)
        self.decode = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 16))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes.weight.expand(len(z), -1, -1)).argmin(-1)
        code = self.codes(nearest)
        commit = F.mse_loss(z, code.detach()) + F.mse_loss(code, z.detach())
        made = self.decode(z + (code - z).detach())
        return {"loss": F.mse_loss(made, x) + 0.25 * commit, "made": made, "codes": nearest}


class Gumbel(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.choose = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 6))
        self.bank = nn.Parameter(torch.randn(6, 16))
        self.dropout = nn.AlphaDropout(dropout)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        pick = F.gumbel_softmax(self.choose(x), tau=0.7, hard=True)
        return self.out(self.dropout(F.selu(pick @ self.bank)))


class Diffusion(nn.Module):
    """Noise added inside at given times; the network predicts it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.start = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.end = nn.Conv2d(16, 3, 3, padding=1)
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 50).cumprod(0))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        kept = self.kept[t][:, None, None, None]
        noise = torch.randn_like(x)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        angle = t[:, None] * torch.exp(-torch.arange(8, device=t.device))
        time = self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        h = self.start(noisy)
        for block in self.blocks:
            h = h + self.dropout(block(F.silu(self.norm(h + time))))
        return F.mse_loss(self.end(h), noise)


class Siamese(nn.Module):
    """One tower called twice, a contrastive loss inside."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            _conv(3, 8, 2), _conv(8, 16, 2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(1024, 16)
        )

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        distance = F.pairwise_distance(self.tower(left), self.tower(right))
        return (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()


class BYOL(nn.Module):
    """A target network that follows the online one in every forward, without gradients."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(dropout))
        self.predict = nn.Linear(24, 24)
        self.register_buffer("weight", self.online[0].weight.detach().clone())
        self.register_buffer("bias", self.online[0].bias.detach().clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.weight.lerp_(self.online[0].weight, 0.1)
                self.bias.lerp_(self.online[0].bias, 0.1)
            goal = F.relu(F.linear(y, self.weight, self.bias))
        return 2 - 2 * F.cosine_similarity(self.predict(self.online(x)), goal).mean()


class Discriminator(nn.Module):
    """Spectral norm: power iteration in buffers at every forward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(
            norm(nn.Conv2d(3, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            norm(nn.Conv2d(8, 16, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout(dropout),
            nn.Flatten(),
            norm(nn.Linear(1024, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(1)


class SpatialTransformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(392, 6)
        )
        self.classify = nn.Sequential(
            nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(392, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        theta = self.locate(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        return self.classify(F.grid_sample(x, grid, align_corners=False))


class PixelCNN(nn.Module):
    """Convolutions whose kernels are masked at every call."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(1 if i == 0 else 12, 12, 5, padding=2) for i in range(3)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Conv2d(12, 4, 1)
        mask = torch.ones(5, 5)
        mask[2, 2:] = 0
        mask[3:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.conv2d(x, layer.weight * self.mask, layer.bias, padding=2)
            x = self.dropout(F.elu(x))
        return self.head(x)


class RealNVP(nn.Module):
    """Coupling layers that return a sample and the log determinant."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 16))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for net in self.nets:
            a, b = x.chunk(2, dim=1)
            scale, shift = net(a).chunk(2, dim=1)
            scale = torch.tanh(scale)
            x = torch.cat([b * scale.exp() + shift, a], dim=1)
            total = total + scale.sum(1)
        return 0.5 * x.square().sum(1) - total


def _images(step: int) -> tuple[Tensor, ...]:
    return (floats(step, 3, 32, 32),)


def _image_entry(name: str, make: Any) -> Entry:
    return entry(name, make, _images, F.cross_entropy, lambda s: classes(s, 10), FAMILY)


def _vector_entry(name: str, make: Any, loss_fn: Any = None) -> Entry:
    target = (lambda s: None) if loss_fn is None else (lambda s: floats(s + 2, 16))
    return entry(name, make, lambda s: (floats(s, 16),), loss_fn, target, FAMILY)


ENTRIES: tuple[Entry, ...] = (
    entry("unet", UNet, _images, F.cross_entropy, lambda s: classes(s, 5, 32, 32), FAMILY),
    _image_entry("resnet_cifar", ResNet),
    _image_entry("alexnet", AlexNet),
    _image_entry("mlp_mixer", Mixer),
    _image_entry("spatial_transformer", SpatialTransformer),
    entry("autoencoder", Autoencoder, _images, F.mse_loss, lambda s: floats(s, 3, 32, 32), FAMILY),
    entry("vae", VAE, lambda s: (floats(s, 8, 8),), vae_loss, lambda s: floats(s, 8, 8), FAMILY),
    entry("vq_vae", VQVAE, lambda s: (floats(s, 5, 16),), family=FAMILY),
    _vector_entry("gumbel", Gumbel, F.mse_loss),
    entry(
        "diffusion",
        Diffusion,
        lambda s: {"x": floats(s, 3, 16, 16), "t": classes(s, 50)},
        family=FAMILY,
    ),
    entry(
        "siamese",
        Siamese,
        lambda s: {
            "left": floats(s, 3, 32, 32),
            "right": floats(s + 1, 3, 32, 32),
            "same": classes(s, 2).float(),
        },
        family=FAMILY,
    ),
    entry("byol", BYOL, lambda s: (floats(s, 16), floats(s + 1, 16)), family=FAMILY),
    entry(
        "spectral_norm_gan",
        Discriminator,
        _images,
        F.binary_cross_entropy_with_logits,
        lambda s: classes(s, 2).float(),
        FAMILY,
    ),
    entry(
        "pixel_cnn",
        PixelCNN,
        lambda s: (floats(s, 1, 12, 12),),
        F.cross_entropy,
        lambda s: classes(s, 4, 12, 12),
        FAMILY,
    ),
    _vector_entry("real_nvp", RealNVP, lambda output, target: output.mean()),
)
