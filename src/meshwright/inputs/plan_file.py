"""Plans in files: written by `meshwright plan --out`, and read by the setting `plan`."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.config.origins import flatten
from meshwright.errors import Setting, UserError, first_line
from meshwright.mesh.axes import AXES, INFER, resolve_alias
from meshwright.plan import MADE_FOR, Plan
from meshwright.text.yaml_text import read_yaml

KEY = "plan"
"""The setting that names the file."""

_PLANNED = ("mesh", "sharding", "pipeline", "precision", "kernels", KEY)
_PLANNED_OF_TRAINING = (
    "global_batch_size", "micro_batch_size", "gradient_accumulation_steps",
    "sync_gradients_every", "mixed_precision",
)  # fmt: skip
"""Settings that a plan replaces: whole sections, and some of `training`."""

_COMPUTE, _MIXED = "precision.compute", "training.mixed_precision"
"""Two names of the compute format."""

_WHICH = "name the plan.yaml of `meshwright plan --out plan.yaml`, or of a run folder"


def made_for_settings(path: str) -> list[str]:
    """Return the hardware and the model that a plan was made for, as settings; none if unknown."""
    known = _made_for(path)
    hardware, settings = known.get("hardware"), known.get("settings")
    found = [f"hardware={hardware}"] if isinstance(hardware, str) else []
    return found + ([str(each) for each in settings] if isinstance(settings, list) else [])


def other_model(path: str | None, num_parameters: int) -> list[str]:
    """Return a warning if a plan was made for a model of another size than the one trained."""
    known = {} if path is None else _made_for(path)
    count = known.get("parameters")
    if not isinstance(count, int) or count == num_parameters:
        return []
    return [
        f"{Setting(KEY, path)} was made for {known.get('model')} with {count:,} parameters, "
        f"and this model has {num_parameters:,}: its mesh may not suit this one, and its "
        "time and memory will differ; run `meshwright plan` for this model"
    ]


def refuse_unnamed_model(path: str | None, num_parameters: int) -> None:
    """Refuse a plan for another model than the default one, if no model was written."""
    if path is None or not other_model(path, num_parameters):
        return
    settings = [word for word in made_for_settings(path) if not word.startswith("hardware=")]
    known = _made_for(path).get("model")
    raise UserError(
        f"{Setting(KEY, path)} was made for {known}, and no model is given",
        why=f"without {Setting('model')}, the default model is used, with {num_parameters:,} "
        "parameters",
        fix=f"write {' '.join(settings)}" if settings else f"write {Setting('model')} as well",
    )


def _made_for(path: str) -> dict[str, Any]:
    """Return what a file says its plan was made for; nothing if it cannot be read."""
    try:
        values: Any = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        # Whoever reads the plan says what is wrong with the file.
        return {}
    found = values.get(MADE_FOR) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def plan_settings(plan: Plan) -> dict[str, Any]:
    """Return a plan as settings of a config, by dotted key."""
    batch, sizes = plan.batch, dict.fromkeys(AXES, 1) | plan.mesh
    settings: dict[str, Any] = {f"mesh.{axis}": size for axis, size in sizes.items()}
    settings |= {
        "mesh.auto": False,
        "training.global_batch_size": batch.global_batch_size,
        "training.micro_batch_size": batch.micro_batch_size,
        "training.gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "training.sync_gradients_every": batch.sync_gradients_every,
        "precision.compute": plan.precision,
        "precision.matmul": plan.matmul,
        "kernels": plan.kernels,
    }
    settings |= {
        f"sharding.{key}": value for key, value in plan.sharding.model_dump(mode="json").items()
    }
    if plan.schedule:
        settings |= {
            "pipeline.schedule": plan.schedule,
            "pipeline.num_microbatches": plan.num_microbatches,
        }
        if plan.num_chunks > 1:
            settings["pipeline.num_chunks"] = plan.num_chunks
    return settings


def without_planned(words: Sequence[str]) -> list[str]:
    """Return the settings of a command line that a plan does not replace, each key once."""
    last = {word.partition("=")[0]: word for word in words}
    return [word for key, word in last.items() if not _is_planned(key.lstrip("+~"))]


def _is_planned(key: str) -> bool:
    section, _, name = key.partition(".")
    return section in _PLANNED or (section == "training" and name in _PLANNED_OF_TRAINING)


def apply_plan_file(
    values: Mapping[str, Any], decided: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a config with the settings of the file that `plan` names, and which come from it.

    A key that the user has decided otherwise is an error.
    """
    path = str(values[KEY])
    plan = read_plan_file(path)
    silent = _left_out(plan) & set(decided)
    settings = {key: value for key, value in plan_settings(plan).items() if key not in silent}
    given = dict(flatten({str(key): value for key, value in values.items()}))
    _refuse_conflicts(path, plan, settings, given, decided)
    return with_settings(values, settings), dict.fromkeys(settings, path)


def with_settings(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed config with other values, given by dotted key."""
    changed: dict[str, Any] = {**values}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section:
            given = changed.get(section)
            own = dict(given) if isinstance(given, Mapping) else {}
            if section == "mesh":
                own = {resolve_alias(str(axis)): size for axis, size in own.items()}
            changed[section] = {**own, name: value}
        else:
            changed[name] = value
    return changed


def read_plan_file(path: str) -> Plan:
    """Read a plan; a file that is missing or holds something else is a `UserError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {Setting(KEY, path)}", why=first_line(error), fix=_WHICH
        ) from None
    try:
        return Plan.from_yaml(text)
    except UserError as error:
        raise UserError(
            f"{Setting(KEY, path)} is not a plan",
            why=": ".join(filter(None, (error.what, error.why))),
            fix=error.fix or _WHICH,
        ) from None


def _left_out(plan: Plan) -> set[str]:
    """Return the settings that a file with a plan does not mention: a person wrote it."""
    written, sharding = plan.model_fields_set, plan.sharding.model_fields_set
    names = {"kernels": "kernels", "precision": _COMPUTE, "matmul": "precision.matmul"}
    return {key for name, key in names.items() if name not in written} | {
        f"sharding.{name}" for name in type(plan.sharding).model_fields if name not in sharding
    }


def _refuse_conflicts(
    path: str,
    plan: Plan,
    settings: Mapping[str, Any],
    given: Mapping[str, Any],
    decided: Collection[str],
) -> None:
    conflicts = {
        key: value
        for key, value in settings.items()
        if key in decided and key in given and given[key] not in (value, INFER)
    }
    mixed = given.get(_MIXED)
    compute = settings.get(_COMPUTE)
    if mixed is not None and compute is not None and {False: "no"}.get(mixed, mixed) != compute:
        conflicts[_MIXED] = compute
    if not conflicts:
        return
    words = [str(Setting(key, given[key])) for key in conflicts]
    names = {key: _COMPUTE if key == _MIXED else key for key in conflicts}
    kept = {"training.global_batch_size": plan.batch.global_batch_size}
    kept |= {} if _MIXED in conflicts else {_COMPUTE: plan.precision}
    same = [f"{key}={value}" for key, value in kept.items() if key not in conflicts]
    again = ["meshwright", "plan", *made_for_settings(path), *same, *words, "--out", path]
    it = "it" if len(words) == 1 else "them"
    raise UserError(
        f"{Setting(KEY, path)} contradicts {' and '.join(words)}",
        why="; ".join(f"{names[key]} is {value} in the plan" for key, value in conflicts.items()),
        fix=f"leave {it} out, or plan again with {it}: {shlex.join(again)}",
    )
