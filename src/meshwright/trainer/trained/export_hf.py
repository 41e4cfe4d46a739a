"""Exporting a trained model as a Hugging Face folder."""

import json
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.checkpoint import CheckpointReader
from meshwright.checkpoint.export import Which, choose_checkpoint, read_averages
from meshwright.config.argument_checks import check_kind, check_path
from meshwright.config.schema import Config
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.errors import UserError
from meshwright.generation.text_settings import read_text_settings
from meshwright.processes import barrier, is_main
from meshwright.program.trace.adapters import Adapter, merge_adapters
from meshwright.trainer.trained.base_weights import Base, find_base, without_factors
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.trained.model_card import CARD, model_card
from meshwright.weights.families import FAMILIES, find_family, read_architecture
from meshwright.weights.hf_folder import CONFIG, TOKENIZER
from meshwright.weights.kept import KeptFiles, read_kept
from meshwright.weights.write_folder import (
    Exported,
    ReadArrays,
    Source,
    check_target,
    reading_order,
    write_folder,
)


def export_hf(
    run: str | Path | FitResult,
    folder: str | Path,
    *,
    step: int | None = None,
    which: Which = "last",
    ema: bool = False,
    dtype: str | None = None,
) -> Exported | None:
    """Write a trained model as a Hugging Face folder, which ``transformers`` loads.

    It has config.json and model.safetensors, or several files with an index above 5 GB, and the
    tokenizer and the generation config of the folder that the training started from.

    Args:
        run: a run folder, its checkpoint folder, a single checkpoint, or the result of a `fit`.
        folder: the folder to write, which must not exist or be empty.
        step: which checkpoint of a folder; the newest by default.
        which: instead of a number: last, or best, the one with the lowest evaluation loss.
        ema: write the moving average of the parameters (``ema_decay``).
        dtype: float32, bfloat16 or float16; by default that of the weights that the training
            started from, or float32.

    Returns:
        What was written; None in processes other than the first.
    """
    target = check_path("folder", folder)
    check_target(target)
    if isinstance(run, FitResult):
        return _export_result(run.averaged() if ema else run, target, dtype)
    check_kind("run", run, (str, Path), "write a run folder, or the result of a fit")
    reader, number = choose_checkpoint(check_path("run", run), step, which)
    metadata = reader.metadata(number)
    kept = files_of(reader.folder.parent)
    kind, arguments = read_kind(metadata.config, kept)
    saved, base = reader.shapes(number), find_base(reader.folder)
    if base is not None:
        base.read()  # Compares the digest before anything is written.
        own = {path: base.shapes[path] for path in base.formats}
        saved = {**saved, _BASE: own}
    groups = {path: group for group in ("state", "params", _BASE) for path in saved.get(group, {})}
    placed = [p for p in groups if any(row.match(p) for row in find_family(kind).rows)]
    wanted = [p for p in without_factors(groups) if groups[p] == "params" or p in placed]

    shapes = {path: saved[groups[path]][path] for path in wanted}
    read_saved = partial(_read_saved, reader, number, groups, base, ema)
    read = _with_adapters(read_saved, () if base is None else base.adapters)
    card = model_card(target.name, metadata, reader.folder.parent, base, peft=False)
    files = {**kept, CARD: card}
    exported = write_folder(Source(kind, arguments, shapes, read, files), target, dtype)
    _warn_rounded(exported, dtype)
    return exported


def files_of(run: Path) -> dict[str, str]:
    """Return the files of a run that its exports have, with a tokenizer where bytes are tokens."""
    kept = read_kept(run)
    if TOKENIZER not in kept and read_text_settings(run).bytes_are_tokens:
        kept[TOKENIZER] = ByteTokenizer.to_json()
    return kept


_BASE = "base"
"""Where weights are that a run does not train, beside the groups of a checkpoint."""


def _read_saved(
    reader: CheckpointReader,
    number: int,
    groups: Mapping[str, str],
    base: Base | None,
    ema: bool,
    paths: Sequence[str],
) -> dict[str, Any]:
    """Return arrays of a checkpoint, its averages or its base, by path."""
    by_group: dict[str, list[str]] = {}
    for path in paths:
        by_group.setdefault(groups[path], []).append(path)
    found = {} if base is None else {_BASE: base.read(by_group.pop(_BASE, []))}
    averages = by_group.pop("params", []) if ema else []
    found |= reader.read(number, by_group) if by_group else {}
    if averages:
        found["params"] = read_averages(reader, number, averages)
    return {path: array for arrays in found.values() for path, array in arrays.items()}


def _with_adapters(read: ReadArrays, adapters: Sequence[Adapter]) -> ReadArrays:
    """Return what reads arrays with their adapters merged into them."""
    by_path = {adapter.path: adapter for adapter in adapters}

    def merged(paths: Sequence[str]) -> Mapping[str, Any]:
        own = [by_path[path] for path in paths if path in by_path]
        values = read([*paths, *(factor for each in own for factor in each.paths)])
        dtypes = {adapter.path: np.float32 for adapter in own}
        return {p: np.asarray(v) for p, v in merge_adapters(own, values, dtypes).items()}

    return merged


def _export_result(result: FitResult, target: Path, dtype: str | None) -> Exported | None:
    """Export a state in memory: every process takes part, and the first writes."""
    assembled = result.assembled
    layout = assembled.traced.layout
    kind, arguments = read_kind(result.metadata.config, result.hf_files)
    whole = NamedSharding(assembled.mesh, PartitionSpec())
    values = assembled.step.leaf_values(result.state)
    places = {
        layout.leaves[source].path: (value, step.source_rows[number] if step.stacked else None)
        for step, value in zip(layout.step_leaves, values, strict=True)
        for number, source in enumerate(step.sources)
    }
    fetch = jax.jit(lambda value: value, out_shardings=whole)
    fetch_row = jax.jit(lambda value, row: value[row], out_shardings=whole)

    def read(paths: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in paths:
            value, row = places[path]
            gathered = fetch(value) if row is None else fetch_row(value, row)
            found[path] = np.asarray(gathered)
        return found

    shapes = {leaf.path: leaf.shape for leaf in layout.leaves if leaf.is_weight}
    merged = _with_adapters(read, list(assembled.model_leaves.adapters.values()))
    base = None if result.run_dir is None else find_base(result.run_dir)
    card = model_card(target.name, result.metadata, result.run_dir, base, peft=False)
    own = {} if result.run_dir is None else files_of(result.run_dir)
    files = {**own, **result.hf_files, CARD: card}
    source = Source(kind, arguments, without_factors(shapes), merged, files)
    if is_main():
        exported = write_folder(source, target, dtype)
        _warn_rounded(exported, dtype)
    else:
        exported = None
        # Arrays are gathered by all processes together, so in the same order.
        for path in reading_order(source):
            merged([path])
    barrier("exported")
    return exported


def _warn_rounded(exported: Exported, asked: str | None) -> None:
    """Warn if trained numbers were rounded to the format that the weights came in."""
    if exported.rounded and asked is None:
        warnings.warn(
            f"{exported.rounded:,} of {exported.parameters:,} numbers were rounded to "
            f"{exported.dtype}, the format of the weights that the training started from; "
            '--dtype float32, or dtype="float32" in Python, keeps them as they were trained',
            UserWarning,
            stacklevel=3,
        )


def read_kind(config: Mapping[str, Any], kept: KeptFiles) -> tuple[str, Mapping[str, Any]]:
    """Return the kind and the arguments of the model of a run."""
    if config:
        model = Config.parse(dict(config)).model
        if model.kind not in FAMILIES:
            raise UserError(
                f"model.kind={model.kind} has no published form",
                why=f"folders for transformers are written of {', '.join(FAMILIES)}",
                fix="write its parameters by their own names: meshwright export RUN "
                "model.safetensors, or mw.export_safetensors",
            )
        return model.kind, model.arguments()
    if CONFIG not in kept:
        raise UserError(
            "how the model was built is not known",
            why="the run was started from Python with a model of its own",
            fix="build it with mw.hf_model(folder), or train with the command line, as "
            + ", ".join(f"model.kind={kind}" for kind in FAMILIES),
        )
    found = read_architecture(json.loads(kept[CONFIG]), "the run")
    return found.family.kind, found.arguments
