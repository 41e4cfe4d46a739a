"""Where a run starts: a checkpoint, the last `fit`, weights, another run, or random values."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.checkpoint import read_params
from meshwright.config.argument_checks import check_path
from meshwright.data.chat_source import find_template
from meshwright.data.chat_template import TEMPLATE
from meshwright.data.document_marks import CONFIG as TOKENIZER_CONFIG
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer
from meshwright.errors import ANY, Setting, UserError
from meshwright.inputs.user_model import exists
from meshwright.program.trace.adapters import merge_adapters
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.programs import Programs
from meshwright.trainer.starting.continuing import choose_start, continued_state
from meshwright.trainer.starting.init_patterns import chosen, proposal, renamed
from meshwright.trainer.starting.resume import ResumePoint, find_resume_point
from meshwright.trainer.trained.base_weights import find_base, without_factors
from meshwright.trainer.trained.export_hf import read_kind
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.trainer_settings import TrainerSettings
from meshwright.weights.hf_folder import TOKENIZER, describe_differences, open_folder
from meshwright.weights.hf_model import HfModel, check_numbers
from meshwright.weights.kept import keep_files, read_kept
from meshwright.weights.load import load_state, weights_of
from meshwright.weights.peft_folder import other_base, read_peft


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    ``state`` makes the state to start from without a checkpoint, and ``initial`` the one that
    training began with, after the ``steps`` of an earlier `fit`. ``remarks`` say what of a folder
    of weights is not used, and ``hf_files`` are what the run remembers of it for exports.
    """

    state: Callable[[], TrainState]
    point: ResumePoint | None = None
    initial: Callable[[], TrainState] | None = None
    steps: int = 0
    remarks: tuple[str, ...] = ()
    source: str = ""
    hf_files: Mapping[str, str] = field(default_factory=dict[str, str])
    weights: str | Path | None = None


def find_start(
    trainer: TrainerSettings, asked: FitSettings, programs: Programs, last: FitResult | None
) -> Start:
    """Return where a run starts; what does not fit the model is refused before compiling."""
    assembled = programs.assembled
    point = find_resume_point(asked.resume, asked.run_dir)
    point, last = choose_start(point, last, asked.resume)
    hf_files = _hf_files(trainer, asked, point)
    weights = _weights_folder(trainer)
    if weights is not None and trainer.init_from is not None:
        raise UserError(
            f"{Setting('model.weights')} and {Setting('model.init_from')} are both set",
            why="training can start from one of them only",
        )

    def fresh() -> TrainState:
        if exists(trainer.model):
            return assembled.adopt(trainer.model, trainer.seed)
        return assembled.init(trainer.seed)

    if weights is None:
        warm = warm_start(trainer.init_from, trainer.init_patterns, assembled)
        start = Start(state=lambda: warm(fresh()), point=point, hf_files=hf_files)
    elif point is not None or last is not None:
        folder = weights

        def loaded() -> TrainState:
            return _from_weights(folder, assembled, trainer.seed, hf_files, compare=False).state()

        start = Start(state=fresh, point=point, initial=loaded, hf_files=hf_files, weights=weights)
    else:
        # The numbers of what a config or hf_model builds were compared before.
        compare = trainer.weights is not None and not asked.config
        start = _from_weights(weights, assembled, trainer.seed, hf_files, compare=compare)
    if trainer.lora is not None and trainer.lora.init_from is not None:
        start = _with_adapters(start, trainer.lora.init_from, asked, assembled)
    if last is None:
        return start
    result, initial = last, start.initial or start.state
    return replace(
        start, state=lambda: continued_state(result, programs), initial=initial, steps=result.steps
    )


def _with_adapters(start: Start, folder: str, asked: FitSettings, assembled: Assembled) -> Start:
    """Return a start with the adapters of a PEFT folder, which is read before anything compiles."""
    adapters = list(assembled.model_leaves.adapters.values())
    kind, _ = read_kind(asked.config, start.hf_files)
    saved = read_peft(path := check_path("lora.init_from", folder), kind, adapters)

    def replaced() -> TrainState:
        values = assembled.canonical(start.state())
        return assembled.start([saved.get(path, value) for path, value in values.items()])

    remarks = filter(None, [*start.remarks, other_base(path, start.weights)])
    source = "; ".join(filter(None, [start.source, f"adapters of {path}"]))
    return replace(start, state=replaced, remarks=tuple(remarks), source=source)


def _weights_folder(trainer: TrainerSettings) -> str | Path | None:
    model = trainer.model
    if trainer.weights is None and isinstance(model, HfModel) and model.pretrained:
        # Parameters of another run replace the folder's.
        return model.folder.path if trainer.init_from is None else None
    return trainer.weights


def _from_weights(
    weights: str | Path,
    assembled: Assembled,
    seed: int,
    hf_files: Mapping[str, str],
    *,
    compare: bool,
) -> Start:
    folder = open_folder(weights)
    found = weights_of(folder, assembled)
    if compare:
        check_numbers(assembled.abstract_model(), folder)

    def load() -> TrainState:
        with activity(f"reading the weights in {weights}"):
            return load_state(found, assembled, seed)

    remarks = (found.skipped,) if found.skipped else ()
    return Start(
        state=load, remarks=remarks, source=found.summary, hf_files=hf_files, weights=weights
    )


def _hf_files(
    trainer: TrainerSettings, asked: FitSettings, point: ResumePoint | None
) -> dict[str, str]:
    """Return what a run remembers for exports; a resumed run has it already."""
    if point is not None and point.same_run and asked.run_dir is not None:
        return read_kept(asked.run_dir)
    if isinstance(trainer.model, HfModel):
        return keep_files(trainer.model.folder, config=trainer.model.config())
    folder = None if trainer.weights is None else Path(trainer.weights)
    tokenizer = asked.data.tokenizer if asked.data is not None and asked.tokenizer else None
    names = dict(tokenizer.marks.names) if isinstance(tokenizer, Tokenizer) else {}
    special = {TOKENIZER_CONFIG: json.dumps(names, indent=2)} if names else {}
    files = special | keep_files(
        open_folder(folder) if folder is not None and folder.is_dir() else None,
        tokenizer=asked.tokenizer,
    )
    data: Any = asked.config.get("data", {}) if asked.config else {}
    given = data.get("template") if data.get("kind") in ("chat", "mixture", "preference") else None
    template = find_template(given, asked.tokenizer)
    if template is None and not asked.config:
        template = getattr(getattr(asked.data, "source", None), "template", None)
        bytes_ = asked.data is not None and isinstance(asked.data.tokenizer, ByteTokenizer)
        files |= {TOKENIZER: ByteTokenizer.to_json()} if template is not None and bytes_ else {}
    return files | ({} if template is None else {TEMPLATE: template.text})


def warm_start(
    run: str | Path | None, patterns: Sequence[str] | None, assembled: Assembled
) -> Callable[[TrainState], TrainState]:
    """Return what replaces the parameters of an initial state by those of a run, if one is given.

    Statistics, such as the running means of BatchNorm, and frozen weights come with them. Without
    patterns, all parameters are taken, and must be the model's own; what does not fit is refused
    here, before anything is compiled.
    """
    if run is None:
        if patterns is not None:
            raise UserError(
                f"{Setting('model.init_patterns')} has no effect without a run",
                fix=f"write {Setting('model.init_from', ANY)} with a run folder",
            )
        return lambda state: state
    own = without_factors({leaf.path: leaf for leaf in assembled.traced.layout.leaves})
    leaves = {path: leaf.shape for path, leaf in own.items()}
    read, base = read_params(run, statistics=True), find_base(Path(run))
    if base is not None:
        dtypes = dict.fromkeys(base.shapes, np.float32)
        read = without_factors(merge_adapters(base.adapters, {**base.read(), **read}, dtypes))
    weights = {path for path, leaf in own.items() if leaf.is_weight}
    wanted = chosen(read.keys(), weights, patterns, run)
    saved = renamed(read, patterns)
    have = {path: saved[path].shape for path in saved if path in wanted}
    need = {path: shape for path, shape in leaves.items() if path in wanted}
    differences = describe_differences(have, need)
    if differences:
        raise UserError(
            f"the parameters of {run} do not fit the model",
            why="; ".join(differences),
            fix=proposal(have, need, leaves),
        )

    def replaced(state: TrainState) -> TrainState:
        values = assembled.canonical(state)
        return assembled.start([saved[p] if p in wanted else values[p] for p in values])

    return replaced
