"""The base of every config object: frozen, strict about keys, with clear errors."""

import difflib
import re
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from meshwright.errors import Spelling, UserError, current_spelling, did_you_mean

Count = Annotated[int, Field(ge=1, lt=2**31)]
"""A number of steps or samples; counters on devices have 32 bits."""


class _Explaining(type(BaseModel)):
    """Turns pydantic's errors into a `UserError` when the class is called."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise explain(error, typing.cast(type[BaseModel], cls)) from None


class Frozen(BaseModel, metaclass=_Explaining):
    """A frozen, keyword-only config object; every mistake is a `UserError`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_true_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # In Python True equals 1, so `mesh.fsdp=true` would mean no sharding at all.
        annotation = cls.model_fields[info.field_name or ""].annotation
        allowed = (annotation, *typing.get_args(annotation))
        if isinstance(value, bool) and any(option in (int, float) for option in allowed):
            in_python = current_spelling() is Spelling.PYTHON
            words = "True or False" if in_python else "true or false"
            raise ValueError(f"input should be a number, not {words}")
        return value

    @classmethod
    def parse(cls, values: dict[str, Any], *, prefix: str = "") -> Self:
        """Validate a plain dict; errors name keys as ``prefix.key``."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, cls, prefix) from None


def explain(error: ValidationError, schema: type[BaseModel], prefix: str = "") -> UserError:
    """Turn pydantic's report into one message: what, why, and what to write instead."""
    details = error.errors(include_url=False)
    explained = [_explain_one(detail, schema, prefix) for detail in details]
    messages = _joined(explained)
    first = messages[0]
    if len(messages) == 1:
        return first
    others = "; ".join(m.what + (f" ({m.fix})" if m.fix else "") for m in messages[1:])
    return UserError(first.what, why=first.why, fix=f"{first.fix}\nalso: {others}".strip())


def _joined(messages: Sequence[UserError]) -> list[UserError]:
    """Join the messages about one value that none of several types accepts."""
    joined: dict[str, UserError] = {}
    for message in messages:
        known = joined.get(message.what)
        if known is not None:
            other = message.why.removeprefix("input should be ")
            message = UserError(known.what, why=f"{known.why} or {other}", fix=message.fix)
        joined[message.what] = message
    return list(joined.values())


def field_paths(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """List every key of a schema as dotted paths."""
    paths: list[str] = []
    for name, info in schema.model_fields.items():
        path = f"{prefix}{name}"
        paths.append(path)
        nested = nested_schema(info.annotation)
        if nested is not None:
            paths.extend(field_paths(nested, f"{path}."))
    return paths


def _explain_one(detail: ErrorDetails, schema: type[BaseModel], prefix: str) -> UserError:
    # Pydantic also names the member of a union that refused the value, as in `constrained-int`.
    location = [str(part) for part in detail["loc"] if not re.search(r"[^\w.]", str(part))]
    key = ".".join(([prefix] if prefix else []) + location) or schema.__name__
    if detail["type"] == "extra_forbidden":
        return unknown_key(key, [f"{prefix}.{p}" if prefix else p for p in field_paths(schema)])
    reason = detail.get("ctx", {}).get("error")
    if isinstance(reason, UserError):
        return reason
    if detail["type"] == "missing":
        return UserError(f"`{key}` is missing", fix=f"write {key}=…")
    message = detail["msg"] if not isinstance(reason, ValueError) else str(reason)
    return UserError(
        f"`{key}={shorten(detail['input'])}` is not valid",
        why=message[0].lower() + message[1:],
        fix=_near_choice(key, detail) if detail["type"] in ("literal_error", "enum") else "",
    )


def _near_choice(key: str, detail: ErrorDetails) -> str:
    """Suggest the nearest allowed word."""
    choices = re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))
    return suggest_value(key, detail["input"], choices)


def unknown_key(key: str, known: Sequence[str]) -> UserError:
    """Return the error for a key that does not exist, with the nearest one that does."""
    section, _, leaf = key.rpartition(".")
    # A section is a field and a group at once.
    known = list(dict.fromkeys(known))
    siblings = [k for k in known if k.rpartition(".")[0] == section]
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    meant = meant_keys(leaf, siblings) or meant_keys(leaf, known)
    hint = did_you_mean(leaf, [k.rpartition(".")[2] for k in siblings], section)
    if meant:
        hint = f"did you mean `{meant[0]}`?"
    elif not hint and elsewhere:
        hint = f"did you mean {' or '.join(f'`{k}`' for k in elsewhere[:3])}?"
    elif not hint and not siblings:
        # Within a section, full keys all resemble each other.
        hint = did_you_mean(key, known)
    listing = ", ".join(k.rpartition(".")[2] for k in siblings)
    holder = f"`{section}` has" if section else "there are"
    where = f"{holder}: {listing}" if siblings else ""
    return UserError(f"there is no `{key}`", why=where, fix=hint)


def shorten(value: object, limit: int = 60) -> str:
    """Return a value's text, cut if it is too long for a message."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def nested_schema(annotation: Any) -> type[BaseModel] | None:
    """Return the schema of a field that is a section; None for a single value."""
    for option in (annotation, *typing.get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


_CALLED = {
    "learning_rate": "lr",
    "global_batch_size": "batch_size batch",
    "micro_batch_size": "per_device_batch_size",
    "max_duration": "epochs num_epochs max_time",
    "steps": "num_steps max_steps train_steps iterations",
    "gradient_accumulation_steps": "accumulation_steps grad_accum",
    "clip_norm": "grad_clip max_grad_norm gradient_clip",
    "warmup_steps": "warmup",
    "schedule": "scheduler lr_schedule",
    "b1": "beta1 betas",
    "b2": "beta2",
    "eps": "epsilon",
    "weight_decay": "wd",
    "num_blocks": "num_layers n_layer",
    "num_heads": "n_head",
    "hidden_size": "d_model n_embd",
    "kind": "name type",
    "eval_every": "eval_steps",
    "every": "save_every save_steps",
    "log_every": "log_steps",
    "seed": "random_seed",
    "hydra.run.dir": "output_dir run_dir out_dir",
}
SYNONYMS = {other: name for name, others in _CALLED.items() for other in others.split()}
"""Names that other tools use for a setting, and the last part of its key here."""

_VALUES = {
    "kernels": {"cudnn": "auto", "flash": "auto", "off": "none", "false": "none", "no": "none"}
}
"""By setting, words that other tools use for its values."""


def meant_keys(name: str, known: Sequence[str]) -> list[str]:
    """Return the keys that a name from another tool stands for."""
    meant = SYNONYMS.get(name, "")
    if "." in meant:
        return [meant]
    return [key for key in known if meant and key.rpartition(".")[2] == meant]


def suggest_value(key: str, written: object, choices: Sequence[str]) -> str:
    """Return ``did you mean `x`?`` for the nearest choice, ignoring case and hyphens; else ""."""
    names = {**_VALUES.get(key, {}), **{choice: choice for choice in choices}}
    word = str(written).lower().replace("-", "_")
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean `{names[near[0]]}`?" if near else ""
