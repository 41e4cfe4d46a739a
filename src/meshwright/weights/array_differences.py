"""How saved arrays differ from those of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.weights.hf_folder import listed


def describe_differences(
    have: Mapping[str, Sequence[int]],
    need: Mapping[str, Sequence[int]],
    where: str = "in the checkpoint",
) -> list[str]:
    """Describe how saved arrays differ from those of a model: missing, further, other shapes.

    Args:
        have: shapes of what is saved, by name.
        need: shapes of what the model has, by name.
        where: where they are saved.
    """
    shapes = [
        f"`{path}` is {list(have[path])} and should be {list(need[path])}"
        for path in need
        if path in have and tuple(have[path]) != tuple(need[path])
    ]
    kinds = {
        f"not {where}": listed([path for path in need if path not in have]),
        "not in the model": listed([path for path in have if path not in need]),
        "other shapes": listed(shapes, quote=""),
    }
    return [f"{kind}: {names}" for kind, names in kinds.items() if names]
