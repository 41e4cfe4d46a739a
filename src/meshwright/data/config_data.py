"""The data of a config: for training, and held out for evaluation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.config.builders import Builder, build, check_arguments, find_builder, parameters_of
from meshwright.config.schema import DataConfig
from meshwright.data.indexed_data import SourceData, SyntheticData
from meshwright.data.initial_fields import with_initial_fields
from meshwright.data.mixture import MixtureData, Weights, common_form, held_out_parts, mix
from meshwright.data.order import split_source
from meshwright.data.protocols import Data, HostBatch, Source
from meshwright.data.records import is_record_files
from meshwright.data.user_data import BATCH_PARAMETERS, is_batch_function, is_source, read_data
from meshwright.errors import Setting, UserError

HELD_OUT = 0.02
"""The fraction of a built-in source that is held out unless data.eval_fraction is set."""

_SOURCES = {
    "text": "text_source:text_source",
    "tokens": "tokens:token_source",
    "jsonl": "record_formats:JsonLines",
    "parquet": "record_formats:ParquetRows",
    "array_record": "record_formats:ArrayRecords",
    "chat": "chat_source:chat_source",
    "arrays": "arrays:array_files",
    "images": "images:image_source",
    "digits": "digits:DigitSource",
    "prompts": "prompts:prompt_source",
    "sums": "prompts:SumSource",
    "preference": "preference:preference_source",
}

DATA_KINDS: tuple[str, ...] = (*_SOURCES, "synthetic", "mixture")
"""The kinds a data section may name."""

_HELD_OUT_STREAM = (1,)
"""Distinguishes the synthetic batches for evaluation from those for training."""


@dataclass(frozen=True)
class ConfigData:
    """The data of a config.

    Sizes of the task and the model are ``shared``: defaults of the source's arguments. The task
    makes the batches of ``data=synthetic``.
    """

    section: DataConfig
    seed: int
    shared: Mapping[str, Any]
    task: Any

    def check(self) -> None:
        """Check that the kind exists and accepts its arguments, without reading any data."""
        if self.section.kind == "synthetic":
            self._synthetic_batches()
        elif self.section.kind == "mixture":
            for member in self._members[0].values():
                member.check()
        else:
            self._arguments()

    @property
    def is_built_in_text(self) -> bool:
        """Whether these are the sentences of the built-in grammar."""
        return self.section.kind == "text" and self.section.arguments().get("path") is None

    @cached_property
    def train(self) -> Data:
        """The data to train on."""
        if self.section.kind == "synthetic":
            return SyntheticData(self._synthetic_batches(), self.seed)
        if self.section.kind == "mixture":
            return MixtureData(self._mixed(0), self._members[1], self.seed, self.section.shuffle)
        if not is_source(self._made):
            return self._made
        return self._read(self._parts[0], shuffle=self.section.shuffle)

    @cached_property
    def held_out(self) -> Data | None:
        """The data to evaluate on, in a fixed order; None if there are none."""
        if self.section.kind == "synthetic":
            return SyntheticData(self._synthetic_batches(), self.seed, _HELD_OUT_STREAM)
        if self.section.kind == "mixture":
            return held_out_parts(self._mixed(1), common_form(self._mixed(0)), self.seed)
        if self.section.eval_path is not None:
            made = self._make(path=self.section.eval_path)
            return self._read(made) if is_source(made) else made
        if not is_source(self._made) or self._parts[1] is None:
            return None
        return self._read(self._parts[1])

    def _read(self, source: Source, *, shuffle: bool = False) -> Data:
        return with_initial_fields(SourceData(source, self.seed, shuffle), self.task)

    @cached_property
    def _members(self) -> tuple[dict[str, ConfigData], Weights]:
        """The data of each source of a mixture, and their weights.

        Other keys of the section are defaults of the sources.
        """
        given = self.section.arguments()
        own = {key: given.pop(key) for key in ("sources", "weights") if key in given}
        asked = check_arguments("data", mix, own)
        mix(**asked)
        common = self.section.model_dump(include={*DataConfig.model_fields} - {"kind", "eval_path"})
        members = {
            name: ConfigData(
                DataConfig.parse({**common, **values}, prefix=f"data.sources.{name}."),
                self.seed,
                {**self.shared, **given},
                self.task,
            )
            for name, values in asked["sources"].items()
        }
        return members, asked["weights"]

    def _mixed(self, part: int) -> dict[str, Any]:
        """Return the sources of a mixture to train on (0), or to evaluate on (1)."""
        found = dict[str, Any]()
        for name, member in self._members[0].items():
            data = member.held_out if part else member.train
            if data is not None and not isinstance(data, SourceData):
                kind = f"data.sources.{name}.kind={member.section.kind}"
                raise UserError(f"{kind} cannot be mixed", why="its rows have no numbers")
            found[name] = None if data is None else data.source
        return found

    @cached_property
    def _made(self) -> Any:
        return self._make()

    @cached_property
    def _parts(self) -> tuple[Source, Source | None]:
        if self.section.eval_path is not None:
            return self._made, None
        fraction = self.section.eval_fraction
        if fraction is None:
            fraction = HELD_OUT if self.section.kind in _SOURCES else 0.0
        return split_source(self._made, fraction)

    def _make(self, **instead: Any) -> Any:
        """Return the source, or `Data` that do not come from a source."""
        builder, arguments = self._arguments(**instead)
        if is_record_files(builder):
            return build("data", self.section.kind, lambda: builder(**arguments).source(), {})
        return read_data(self.section.kind, builder, arguments)

    def _arguments(self, **instead: Any) -> tuple[Builder, dict[str, Any]]:
        builder = find_builder("data", self.section.kind, DATA_KINDS, _load)
        if "path" in instead and "path" not in parameters_of(builder):
            raise UserError(
                f"{Setting('data.eval_path', instead['path'])} cannot be read",
                why=f"data.kind={self.section.kind} takes no path",
                fix="write data.eval_fraction=… instead, or choose another data.kind",
            )
        settings = self.section.model_dump(include=set(DataConfig.model_fields) - {"kind"})
        known = {"seed": self.seed, **self.shared, **settings}
        accepted = {name: known[name] for name in parameters_of(builder) if name in known}
        given = {**accepted, **self.section.arguments(), **instead}
        supplied = BATCH_PARAMETERS if is_batch_function(builder) else ()
        return builder, check_arguments("data", builder, given, supplied)

    def _synthetic_batches(self) -> Callable[[int, int], HostBatch]:
        make = getattr(self.task, "synthetic_batch", None)
        if make is None:
            raise UserError(
                "the task cannot make batches for data=synthetic",
                why="it has no method synthetic_batch(seed, batch_size)",
                fix="write data.kind=package.module:function with a function of step and "
                "batch_size",
            )
        return make


def _load(kind: str) -> Builder:
    module, _, name = _SOURCES[kind].partition(":")
    return getattr(importlib.import_module(f"meshwright.data.{module}"), name)
