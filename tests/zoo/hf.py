"""Hugging Face models from a class name and a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tests.zoo.case import Case, Entry, LossFn

# How configurations call the probabilities that a user means by "dropout".
_WORDS = ("dropout", "pdrop", "drop_path", "drop_rate")
# A layer that is left out leaves a cache of another structure behind, which eager cannot gather.
_LAYERS = ("layerdrop", "layer_drop")


def entry(
    name: str,
    model: str,
    sizes: Mapping[str, Any],
    inputs: Callable[[int], dict[str, Any]],
    family: str,
    *,
    loss_fn: LossFn | None = None,
    target: Callable[[int], Any] = lambda step: None,
    lists: tuple[str, ...] = (),
) -> Entry:
    """An entry for ``transformers.<model>`` with its own config class and the given sizes."""

    def build(dropout: float) -> Case:
        return Case(pretrained(model, sizes, dropout), inputs, loss_fn, target)

    return Entry(name, family, build, "transformers", lists)


def pretrained(model: str, sizes: Mapping[str, Any], dropout: float) -> nn.Module:
    """A random model of this class; a dict among the sizes is the config of a part."""
    import transformers

    cls = getattr(transformers, model)
    config = cls.config_class(**sizes)
    set_dropout(config, dropout)
    made: nn.Module = cls(config)
    return made


def set_dropout(config: Any, probability: float) -> None:
    """Give all dropout probabilities of a config and its parts the same value."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            set_dropout(value, probability)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif any(word in name for word in _LAYERS):
            setattr(config, name, 0.0)
        elif any(word in name for word in _WORDS):
            # A few configurations declare a probability as an integer: all or nothing.
            _set(config, name, probability)


def _set(config: Any, name: str, probability: float) -> None:
    from huggingface_hub.errors import StrictDataclassError

    try:
        setattr(config, name, probability)
    except StrictDataclassError:
        setattr(config, name, round(probability))
