"""PEFT folders: adapters by the names that PEFT gives them, written and read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import Setting, UserError
from meshwright.program.trace.adapters import Adapter
from meshwright.weights.families import find_family
from meshwright.weights.family import TensorRow
from meshwright.weights.hf_folder import listed
from meshwright.weights.safetensors_format import read_header, read_remarks, write_file

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DIGEST = "base_digest"
_PREFIX = "base_model.model."
_OTHER = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "target_parameters": (None, []),
}
"""Keys of adapter_config.json that must have one of these values, or be left out."""


@dataclass(frozen=True)
class _Place:
    """Where PEFT keeps a factor of a layer.

    ``order`` is that of the factor's dims in the tensor. The factor of the inputs comes ``first``,
    and PEFT keeps it transposed.
    """

    module: str
    name: str
    path: str
    shape: tuple[int, ...]
    order: list[int]
    first: bool

    def tensor(self, factor: NDArray[Any]) -> NDArray[Any]:
        """Return the tensor of a factor: [rank, inputs] or [outputs, rank]."""
        flat = factor.transpose(*self.order, len(self.order)).reshape(-1, self.shape[-1])
        return flat.T if self.first else flat

    def factor(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """Return the factor of a tensor."""
        flat, stored = tensor.T if self.first else tensor, [self.shape[d] for d in self.order]
        back = [self.order.index(d) for d in range(len(self.order))]
        return flat.reshape(*stored, self.shape[-1]).transpose(*back, len(back))


def _places(adapter: Adapter, kind: str) -> list[_Place]:
    """Return where PEFT keeps the two factors of an adapter."""
    row = next(filter(None, (row.match(adapter.path) for row in find_family(kind).rows)), None)
    orders = [] if row is None or adapter.tied else _orders(adapter, row)
    if row is None or len(orders) < 2:
        raise UserError(
            f"the adapter of `{adapter.path}` has no name in PEFT",
            why="PEFT adapts whole layers of transformers, each for itself, and this weight is "
            + ("none of them" if row is None else f"a part of `{row.name}`, or also the head"),
            fix="write merged weights: --to hf FOLDER, or mw.export_hf",
        )
    module = row.name.removesuffix(".weight")
    suffixes = ("embedding_A", "embedding_B") if adapter.lookup else ("A.weight", "B.weight")
    each = zip(suffixes, adapter.paths, adapter.shapes, orders, (True, False), strict=True)
    return [
        _Place(module, f"{_PREFIX}{module}.lora_{end}", path, shape, order, first)
        for end, path, shape, order, first in each
    ]


def _orders(adapter: Adapter, row: TensorRow) -> list[list[int]]:
    """Return the order of a weight's inputs and outputs in its tensor; fewer if it has others."""
    stored, wanted = row.view.dims
    if any(len(dim) > 1 for dim in wanted) or len(stored) != 2:
        return []
    split = adapter.split
    sides = [[wanted[d][0] for d in sorted(dims)] for dims in (split.inputs, split.outputs)]
    return [
        [side.index(name) for name in dim]
        for side in sides
        for dim in stored
        if sorted(dim) == sorted(side)
    ]


def write_peft(
    target: Path,
    kind: str,
    adapters: Sequence[Adapter],
    factors: Mapping[str, NDArray[Any]],
    *,
    base: str | None,
    shapes: Mapping[str, Sequence[int]],
    dropout: float = 0.0,
    digest: str = "",
) -> list[str]:
    """Write a PEFT folder of adapters and their factors; return the names of its tensors.

    ``digest`` is that of the base, which is compared when the adapters are read again.
    """
    places = [place for adapter in adapters for place in _places(adapter, kind)]
    tensors = {place.name: place.tensor(np.asarray(factors[place.path])) for place in places}
    modules = [place.module for place in places]
    first, rows = adapters[0], find_family(kind).rows
    every = [row.name for path in shapes for row in (r.match(path) for r in rows) if row]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.scale * first.rank,
        "lora_dropout": dropout,
        "target_modules": _short(modules, every),
        "bias": "none",
        "fan_in_fan_out": kind == "gpt",
        "inference_mode": True,
    }
    (target / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_file(
        target / PEFT_WEIGHTS,
        {name: tensor.shape for name, tensor in tensors.items()},
        "float32",
        iter(tensors.values()),
        **{_DIGEST: digest},
    )
    return list(tensors)


def digest_of_base(folder: Path) -> str:
    """Return the digest of the base that adapters were trained on; empty if it is not known."""
    return read_remarks(folder / PEFT_WEIGHTS).get(_DIGEST, "")


def _short(modules: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return the last parts of modules' names, if they name no others."""
    short = {module.rpartition(".")[2] for module in modules}
    named = {name for name in every if name.removesuffix(".weight").rpartition(".")[2] in short}
    kernels = {name for name in named if name.endswith(".weight")}
    return sorted(short) if kernels == {f"{m}.weight" for m in modules} else sorted(modules)


def other_base(folder: Path, weights: str | Path | None) -> str:
    """Warn if a PEFT folder names another base than these weights; empty if none can be told.

    If it has the digest of its base, that is compared instead.
    """
    if digest_of_base(folder):
        return ""
    own = Path(weights or "").resolve()
    named = Path(_read_config(folder).get("base_model_name_or_path") or own)
    # It may be a name of the Hub, or a folder of another machine.
    alike = named.name == own.name or f"--{str(named).replace('/', '--')}" in str(own)
    if weights is None or named.resolve() == own or (alike and not named.is_dir()):
        return ""
    return f"the adapters in {folder} were trained on {named}, and the run's base is {weights}"


def read_peft(folder: Path, kind: str, adapters: Sequence[Adapter]) -> dict[str, NDArray[Any]]:
    """Return the factors of the run's adapters that a PEFT folder has, by path."""
    config = _read_config(folder)
    _check(folder, config, adapters[0].rank)
    have = read_header(folder / PEFT_WEIGHTS)
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1)
    found: dict[str, NDArray[Any]] = {}
    for adapter in adapters:
        for place in _places(adapter, kind):
            tensor = have.pop(place.name, None)
            if tensor is None:
                continue
            need = place.tensor(np.empty(place.shape, np.float32)).shape
            if tensor.shape != need:
                raise UserError(
                    f"the adapters in {folder} are of another base",
                    why=f"`{tensor.name}` is {list(tensor.shape)} there, and {list(need)} for "
                    f"`{adapter.path}` of this model",
                    fix="use the base that they were trained on"
                    f" ({config.get('base_model_name_or_path') or 'which they do not name'})",
                )
            read = tensor.read([(0, n) for n in tensor.shape]).astype(np.float32)
            factor = 1.0 if place.first else scale / adapter.scale
            found[place.path] = place.factor(read) * np.float32(factor)
    if have or not found:
        raise UserError(
            f"the adapters in {folder} are not those of the run",
            why=f"it has {listed(sorted(have))}, for which the run has no adapter"
            if have
            else "none of its tensors is of an adapter of the run",
            fix=f"adapt the same layers: {Setting('lora.targets')}",
        )
    return found


def _check(folder: Path, config: Mapping[str, Any], rank: int) -> None:
    wrong = [k for k, known in _OTHER.items() if config.get(k, known[0]) not in known]
    if config.get("peft_type", "LORA") != "LORA" or wrong:
        key = wrong[0] if wrong else "peft_type"
        raise UserError(
            f"the adapters in {folder} are of a kind that is not supported",
            why=f"{PEFT_CONFIG} says {key}={config[key]}",
            fix="merge them with PEFT (merge_and_unload), and start from the merged folder",
        )
    if config["r"] != rank:
        raise UserError(
            f"the adapters in {folder} have rank {config['r']}, and those of the run {rank}",
            fix=f"write {Setting('lora.rank', config['r'])}",
        )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / PEFT_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "of a run, write one first: meshwright export RUN --to peft FOLDER"
        why = f"{PEFT_CONFIG}: {error}"
        raise UserError(f"{folder} is not a PEFT folder", why=why, fix=fix) from error
