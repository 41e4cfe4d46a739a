"""Exporting the adapters of a run as a PEFT folder."""

from pathlib import Path
from typing import Any

from meshwright.checkpoint.export import Which, choose_checkpoint, read_averages
from meshwright.config.argument_checks import check_path
from meshwright.errors import UserError
from meshwright.trainer.trained.base_weights import find_base
from meshwright.trainer.trained.export_hf import files_of, read_kind
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.trained.model_card import CARD, model_card
from meshwright.weights.hf_folder import CONFIG
from meshwright.weights.peft_folder import write_peft
from meshwright.weights.write_folder import check_target


def export_peft(
    run: str | Path | FitResult,
    folder: str | Path,
    *,
    step: int | None = None,
    which: Which = "last",
    ema: bool = False,
) -> list[str]:
    """Write the adapters of a run as a folder that the package ``peft`` loads.

    Args:
        run: a run folder, its checkpoint folder or a single checkpoint, or the result of a run.
        folder: the folder to write, which must not exist or be empty.
        step: which checkpoint; the newest by default.
        which: instead of a number: last, or best, the one with the lowest evaluation loss.
        ema: write the moving average of the adapters (``ema_decay``).

    Returns:
        The names of its tensors.
    """
    target = check_path("folder", folder)
    check_target(target)
    source = run.run_dir if isinstance(run, FitResult) else run
    if source is None:
        raise UserError("the run has no folder", fix="train with run_dir=, which keeps its base")
    reader, number = choose_checkpoint(check_path("run", source), step, which)
    base, metadata = find_base(reader.folder), reader.metadata(number)
    if base is None or not base.adapters:
        raise UserError(
            f"the run in {reader.folder.parent} has no adapters",
            why="PEFT folders hold adapters alone",
            fix="write all weights: --to hf FOLDER, or mw.export_hf",
        )
    kept = files_of(reader.folder.parent)
    kind, _ = read_kind(metadata.config, kept)
    factors = [path for adapter in base.adapters for path in adapter.paths]
    others = sorted(set(reader.shapes(number)["params"]) - set(factors))
    if others:
        raise UserError(
            f"`{others[0]}` is trained besides the adapters",
            why="a PEFT folder would leave it out",
            fix="write merged weights: --to hf FOLDER, or mw.export_hf",
        )
    base.read()
    arrays: Any = (
        read_averages(reader, number, factors)
        if ema
        else reader.read(number, {"params": factors})["params"]
    )
    target.mkdir(parents=True, exist_ok=True)
    dropout = metadata.config.get("lora", {}).get("dropout", 0.0)
    names = write_peft(
        target, kind, base.adapters, arrays,
        base=base.weights, shapes=base.shapes, dropout=dropout, digest=base.identity,
    )  # fmt: skip
    card = model_card(target.name, metadata, base.run, base, peft=True)
    for name, text in {**kept, CARD: card}.items():
        if name != CONFIG:
            (target / name).write_text(text, encoding="utf-8")
    return names
