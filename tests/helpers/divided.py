"""Models that are divided between parts, their batches, and plain training of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt import GPT
from examples.switch import Model as Switch
from examples.switch import batches
from pdcompile.eager.optimizers import NamedParameters

VOCABULARY, BATCH, LENGTH, PIECES = 96, 8, 16, 4


def model_of(name: str) -> nn.Module:
    """A small model; Hugging Face's have their loss inside."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(2, 64, 4, LENGTH)
    if name == "mlp":
        return _Mlp()
    if name == "switch":
        return Switch()
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "llama": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 4,
                  "max_position_embeddings": 32, "vocab_size": VOCABULARY, "use_cache": False},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
                 "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
                 "vocab_size": VOCABULARY, "use_cache": False},
        "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
               "dropout_rate": 0.0, "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
               "use_cache": False},
        "bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "intermediate_size": 128, "max_position_embeddings": 32, "vocab_size": VOCABULARY,
                 "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "vit": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 128, "image_size": 32, "patch_size": 8, "num_labels": 8,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    }  # fmt: skip
    of_experts: dict[str, Any] = {
        "mixtral": {"num_local_experts": 4, "output_router_logits": True},
        "qwen2moe": {"num_experts": 4, "moe_intermediate_size": 32,
                     "shared_expert_intermediate_size": 32, "output_router_logits": True},
        "deepseek": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "v_head_dim": 16,
                     "first_k_dense_replace": 1, "moe_intermediate_size": 32, "q_lora_rank": 32,
                     "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    }  # fmt: skip
    for one, more in of_experts.items():
        sizes[one] = sizes["llama"] | more | {"num_experts_per_tok": 2}
    kinds = {
        "llama": ("Llama", "ForCausalLM"), "gpt2": ("GPT2", "LMHeadModel"),
        "t5": ("T5", "ForConditionalGeneration"), "bert": ("Bert", "ForMaskedLM"),
        "vit": ("ViT", "ForImageClassification"), "mixtral": ("Mixtral", "ForCausalLM"),
        "qwen2moe": ("Qwen2Moe", "ForCausalLM"), "deepseek": ("DeepseekV3", "ForCausalLM"),
    }  # fmt: skip
    first, last = kinds[name]
    made: nn.Module = getattr(transformers, first + last)(
        getattr(transformers, f"{first}Config")(**sizes[name])
    )
    return made


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64),
            nn.Tanh(), nn.Linear(64, 16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def batch_of(name: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """Inputs by name, and the target of a loss that is not the model's own."""
    draw = torch.Generator().manual_seed(1)
    if name == "mlp":
        return {"x": torch.randn(BATCH, 16, generator=draw)}, None
    if name == "vit":
        pixels = torch.randn(BATCH, 3, 32, 32, generator=draw)
        return {"pixel_values": pixels, "labels": torch.arange(BATCH)}, None
    if name == "switch":
        return next(batches(BATCH))[0], None
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw)
    if name == "gpt":
        return {"ids": ids}, ids.roll(-1, 1)
    given = {"input_ids": ids, "labels": ids.clone()}
    if name in ("mixtral", "qwen2moe"):  # the loss of their routers is a mean over what it shows
        given["attention_mask"] = torch.ones_like(ids)
    return given, None


def plain_training(
    model: nn.Module, inputs: Mapping[str, Tensor], target: Tensor | None,
    loss_fn: Callable[..., Tensor] | None, clip: float | None, *, lag: bool = False,
    build: Callable[[Any], Any] | None = None, decay: float = 1.0,
) -> tuple[dict[str, Tensor], list[float]]:  # fmt: skip
    """Three steps of accumulated gradients: the state, and the losses.

    `lag`: gradients are those of the weights before the last update (2bw).  `decay`: of learning
    rates, after each step.
    """
    named = NamedParameters(model.named_parameters())
    made = build(named) if build else torch.optim.SGD(named, lr=0.1, momentum=0.9)
    optimizers = made if isinstance(made, list) else [made]
    losses, older = [], copy.deepcopy(model)
    for _ in range(3):
        at = older if lag else model
        at.zero_grad()
        found = 0.0
        for piece in range(PIECES):
            rows = slice(piece * BATCH // PIECES, (piece + 1) * BATCH // PIECES)
            given = {key: value[rows] for key, value in inputs.items()}
            made = at(**given)
            loss = loss_fn(made, target[rows]) if loss_fn and target is not None else made
            loss = loss["loss"] if isinstance(loss, dict) else getattr(loss, "loss", loss)
            loss = loss / PIECES
            loss.backward()
            found += loss.item()
        if lag:
            newest = copy.deepcopy(model)
            for own, other in zip(model.parameters(), at.parameters(), strict=True):
                own.grad = other.grad
            older = newest
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= decay
        losses.append(found)
    return {name: value.detach() for name, value in model.state_dict().items()}, losses


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's update of each parameter, as long as the parameter is."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - first)
                state["v"].lerp_(p.grad.square(), 1 - second)
                m = state["m"] / (1 - first ** state["step"])
                v = state["v"] / (1 - second ** state["step"])
                update = m / (v.sqrt() + 1e-6) + group["weight_decay"] * p
                p.sub_(update * (group["lr"] * p.norm() / update.norm().clamp(min=1e-12)))


def muon_and_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, AdamW for everything else.

    Muon multiplies in bfloat16, where the last bit of a gradient moves a weight by some percent of
    the learning rate.  AdamW's eps is above the rounding that the gradient of a key's bias is.
    """
    inside = {n: p.ndim == 2 and n.startswith("blocks") for n, p in parameters.named}
    matrices = [p for n, p in parameters.named if inside[n]]
    rest = [p for n, p in parameters.named if not inside[n]]
    made: list[torch.optim.Optimizer] = []
    made += [torch.optim.Muon(matrices, lr=1e-4)] if matrices else []
    return made + ([torch.optim.AdamW(rest, lr=1e-2, eps=1e-5)] if rest else [])


def by_sizes(parameters: Any) -> torch.optim.Optimizer:
    """Groups by numbers of elements, which slices have fewer of."""
    groups: list[list[Tensor]] = [[], []]
    for one in parameters:
        groups[one.numel() > 10_000].append(one)
    return torch.optim.SGD([{"params": groups[0], "lr": 0.01}, {"params": groups[1], "lr": 0.1}])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "muon": muon_and_adamw,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lamb": Lamb,
    "sizes": by_sizes,
}
