"""Values of a config.json: each key is used, known to have no effect, or refused by name."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError


class WrongValue(ValueError):
    """A value of config.json that no model can have; None if it is null or missing."""

    def __init__(self, key: str, value: Any, expected: str) -> None:
        super().__init__(f"{key}={json.dumps(value)} is not {expected}")
        self.key, self.value, self.expected = key, value, expected


@dataclass(frozen=True)
class Key:
    """What a key of config.json means to a family.

    Attributes:
        rule: what its value has to be, as `check_value` calls it.
        default: its value where config.json leaves it out.
        argument: the argument of the model that holds the value; empty if it is read otherwise.
        null: whether it may be null, which then stands for something.
        only: the values that the model supports; empty for all that the rule allows.
    """

    rule: str
    default: Any = None
    argument: str = ""
    null: bool = False
    only: tuple[Any, ...] = ()


def only(*values: Any) -> Key:
    """Return a key of which the model supports these values; a missing one has the first."""
    return Key("", values[0], only=values)


def without_effect(*keys: str) -> dict[str, Key]:
    """Return keys that the model does not need, and that transformers does not read either."""
    return dict.fromkeys(keys, Key(""))


_FILE = """
_name_or_path name_or_path transformers_version model_type architectures torch_dtype dtype
_commit_hash tokenizer_class task_specific_params finetuning_task problem_type prefix id2label
label2id num_labels transformers.js_config unsloth_fixed unsloth_version is_llama_config
rope_interleaved pretraining_tp use_bfloat16 torchscript _num_labels n_special output_past
predict_special_tokens
"""
"""What the file is, where it came from, and what other heads or programs need."""

_RUNNING = """
use_cache gradient_checkpointing output_attentions _output_attentions output_hidden_states
return_dict chunk_size_feed_forward initializer_range initializer_factor init_std
attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
experts_implementation _experts_implementation _experts_implementation_internal
cache_implementation
"""
"""How a program runs, where it starts without weights, and what it returns besides logits."""

_GENERATION = """
bos_token_id eos_token_id sep_token_id decoder_start_token_id forced_bos_token_id
forced_eos_token_id bad_words_ids begin_suppress_tokens suppress_tokens max_length min_length
do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences output_scores
return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
assistant_confidence_threshold assistant_lookbehind target_lookbehind num_assistant_tokens
num_assistant_tokens_schedule
"""
"""Special tokens, and how text is generated."""

WITHOUT_EFFECT = frozenset(f"{_FILE}{_RUNNING}{_GENERATION}".split())
"""Keys of every family that change no logit."""


def complete(
    config: Mapping[str, Any], keys: Mapping[str, Key], architecture: str
) -> dict[str, Any]:
    """Return the values of a config.json with the defaults of those that it leaves out.

    Keys that the family does not read may not be there, unless they have no effect.
    """
    others = [key for key in config if key not in keys and key not in WITHOUT_EFFECT]
    unknown = [key for key in others if config[key] is not None]
    if unknown:
        raise UserError(
            f"config.json has keys that are not known: {', '.join(f'`{k}`' for k in unknown)}",
            why=f"whether they change what a {architecture} computes is not known either",
            fix="remove them from config.json if they do not",
        )
    values = {key: config.get(key, rule.default) for key, rule in keys.items()}
    for key in keys.keys() & config.keys():
        rule, value = keys[key], config[key]
        # Equal values of another type are others, since true is not 1.
        if rule.only and (type(value), value) not in [(type(each), each) for each in rule.only]:
            raise UserError(
                f"this {architecture} is not supported",
                why=f"its config.json says {key}={value}; supported: "
                + " or ".join(map(str, rule.only)),
            )
        if rule.rule and not (value is None and rule.null):
            check_value(key, value, rule.rule)
    return values


def check_value(key: str, value: Any, rule: str) -> None:
    """Raise `WrongValue` for a value that is not what a rule says."""
    expected, right = _RULES[rule]
    if not right(value):
        raise WrongValue(key, value, expected)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a whole number, 1 or more", lambda value: _whole(value) and value > 0),
    "token": ("a whole number", _whole),
    # transformers refuses 0 and 1 where it expects 0.0 and 1.0.
    "small": (
        "a decimal number, 0 or more",
        lambda value: isinstance(value, float) and _number(value) and value >= 0,
    ),
    "positive": ("a number above 0", lambda value: _number(value) and value > 0),
    "rate": ("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object with keys", lambda value: isinstance(value, Mapping)),
}

_ROPE = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings",
}  # fmt: skip
"""Keys of rotary settings; a type that does not use one ignores it."""

ROTARY = {
    "rope_theta": Key("positive"),
    "rope_scaling": Key("object", null=True),
    "rope_parameters": Key("object", null=True),
    "partial_rotary_factor": only(None, 1.0),
}
"""Keys of config.json for rotary positions."""


def rotary(values: Mapping[str, Any], *known: str) -> dict[str, Any]:
    """Return the rotary settings: rope_type, rope_theta and its numbers; refuse types not known.

    As in transformers, the older spelling replaces the newer one, and its base the one outside.
    """
    key = "rope_scaling" if values["rope_scaling"] else "rope_parameters"
    settings = rope_settings(values[key] or {}, values["rope_theta"] or 10_000.0, key)
    refuse_other_scaling(settings, *known)
    return settings


def rope_settings(found: Mapping[str, Any], base: float, where: str) -> dict[str, Any]:
    """Return rotary settings with their type and base; refuse keys that are not known."""
    # Some write that all dims are rotated, which is what the others do without saying so.
    found = dict(each for each in found.items() if each != ("partial_rotary_factor", 1.0))
    unknown = sorted(found.keys() - _ROPE)
    if unknown:
        raise UserError(
            f"`{where}.{unknown[0]}` in config.json is not supported",
            why=f"known keys: {', '.join(sorted(_ROPE))}",
        )
    settings = {"rope_type": found.get("type", "default"), "rope_theta": base, **found}
    check_value(f"{where}.rope_theta", settings["rope_theta"], "positive")
    return {**settings, "rope_theta": float(settings["rope_theta"])}


def scaling_numbers(settings: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the numbers of scaled rotary positions; refuse settings that lack one."""
    for key in keys:
        check_value(f"rope_scaling.{key}", settings.get(key), "positive")
    return {key: settings[key] for key in keys}


def refuse_other_scaling(settings: Mapping[str, Any], *known: str) -> None:
    """Refuse a kind of rotary positions that the model does not support."""
    if settings["rope_type"] not in known:
        raise UserError(
            f"rotary positions of the type {settings['rope_type']} are not supported",
            why=f"config.json asks for them; known types: {', '.join(known)}",
        )
