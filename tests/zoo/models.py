"""The zoo: real architectures by name, fixed before any of them was tried.

``pippy`` marks the Hugging Face models of PiPPy's examples folder.
"""

from __future__ import annotations

from tests.zoo import (
    multimodal,
    plain_graphs,
    plain_sequences,
    plain_vision,
    seq2seq,
    text_decoders,
    text_encoders,
    timm_models,
    vision_audio,
)
from tests.zoo.case import Entry

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for module in (
        text_encoders,
        text_decoders,
        seq2seq,
        vision_audio,
        multimodal,
        plain_sequences,
        plain_vision,
        plain_graphs,
        timm_models,
    )
    for entry in module.ENTRIES
}

FAMILIES = tuple(dict.fromkeys(entry.family for entry in ENTRIES.values()))


def chosen(names: tuple[str, ...] = (), families: tuple[str, ...] = ()) -> tuple[Entry, ...]:
    """Entries by name or family; all of them without either.

    Raises:
        KeyError: a name or family is not in the zoo.
    """
    for name in names:
        if name not in ENTRIES:
            raise KeyError(f"{name!r} is not in the zoo")
    for family in families:
        if family not in FAMILIES:
            raise KeyError(f"{family!r} is none of {', '.join(FAMILIES)}")
    everything = not names and not families
    return tuple(
        entry
        for entry in ENTRIES.values()
        if everything or entry.name in names or entry.family in families
    )
