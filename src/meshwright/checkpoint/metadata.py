"""The metadata stored beside the arrays of a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import ANY, Setting, UserError

FORMAT = 3
"""The format of checkpoints that this version writes and reads."""


def check_format(what: str, found: Any, needed: int) -> None:
    """Raise if something was written in another format than this version reads."""
    if found != needed:
        raise UserError(
            f"{what} has another format",
            why=f"its format is {found or 'not known'}, and this version of meshwright reads "
            f"format {needed} only",
            fix="use the version that wrote it, or start a new run with "
            f"{Setting('hydra.run.dir', ANY)}",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """What a checkpoint records about the run that wrote it.

    Attributes:
        dataset: fingerprint of the data; empty if it has none.
        num_samples: samples of the data; None if not known.
        global_batch_size: samples per step, which a resumed run keeps.
        config: the full config of the run; empty for runs started from Python.
        data_position: where data that is read in order continues, as its iterator describes it;
            None if the number of steps says it.
        skipped: steps that were skipped because they were not finite.
        left_out: the batches left out when the run went back, as the first and the last of each.
        run: the run that it belongs to, as in the `run.id` of its folder; empty if unknown.
        training: what a run from Python trains: a digest of its loss, and its optimizer's settings.
    """

    step: int
    seed: int
    dataset: str = ""
    num_samples: int | None = None
    global_batch_size: int
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    data_position: Any = None
    processes: int = 1
    skipped: int = 0
    left_out: Sequence[Sequence[int]] = field(default_factory=list)
    training: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    format: int = FORMAT
