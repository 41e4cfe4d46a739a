"""Where a training starts from: random weights, a folder of weights, or another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import Setting, UserError
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.trainer.resuming.resume import ResumePoint
from meshwright.trainer.starting.warm_start import warm_start
from meshwright.weights.hf_folder import open_folder
from meshwright.weights.hf_model import check_numbers
from meshwright.weights.kept import read_kept
from meshwright.weights.load import load_state, weights_of


@dataclass(frozen=True)
class Initial:
    """The initial state of a training.

    Attributes:
        state: makes it.
        remarks: what of a folder is not used.
        source: where the weights come from, in one line; empty if they are random or a run's.
    """

    state: Callable[[], TrainState]
    remarks: tuple[str, ...] = ()
    source: str = ""


def remembered_files(
    point: ResumePoint | None, run_dir: Path | None, keep: Callable[[], dict[str, str]]
) -> dict[str, str]:
    """Return what a run remembers for exports; a resumed run has it already.

    Args:
        point: the checkpoint the run resumes from; None if it does not.
        run_dir: the run folder; None if it has none.
        keep: reads it from the folder of the weights and the tokenizer of the data.
    """
    if point is not None and point.same_run and run_dir is not None:
        return read_kept(run_dir)
    return keep()


def find_initial(
    assembled: Assembled,
    seed: int,
    fresh: Callable[[], TrainState],
    *,
    weights: str | Path | None,
    init_from: str | Path | None,
    init_patterns: Sequence[str] | None,
    resumed: bool,
    compare: bool = False,
) -> Initial:
    """Return the initial state; what does not fit the model is refused before anything compiles.

    Args:
        assembled: the step.
        seed: the seed of what is random.
        fresh: makes a state that starts from neither weights nor a run.
        weights: a Hugging Face folder; None for none.
        init_from: a run or a checkpoint; None for none.
        init_patterns: path patterns of the parameters to take from it; None takes all.
        resumed: whether a checkpoint of the run itself replaces the initial state.
        compare: whether the model may have other numbers than the folder's config.json.
    """
    if weights is None:
        warm = warm_start(init_from, init_patterns, assembled)
        return Initial(lambda: warm(fresh()))
    if init_from is not None:
        raise UserError(
            f"{Setting('model.weights')} and {Setting('model.init_from')} are both set",
            why="training can start from one of them only",
        )
    if resumed:
        return Initial(fresh)
    folder = open_folder(weights)
    found = weights_of(folder, assembled)
    if compare:
        check_numbers(assembled.abstract_model(), folder)

    def load() -> TrainState:
        with activity(f"reading the weights in {weights}"):
            return load_state(found, assembled, seed)

    return Initial(load, (found.skipped,) if found.skipped else (), found.summary)
