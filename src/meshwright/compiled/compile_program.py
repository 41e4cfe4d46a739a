"""Compiling a program: options of the compiler, and the text of programs, also from the cache."""

import functools
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshwright.compiled.disk_cache import (
    ProgramFacts,
    disk_cache,
    keep_facts,
    key_of,
    load_facts,
    no_disk_cache,
)
from meshwright.compiled.memory import MemoryUse, memory_of
from meshwright.errors import EnvironmentProblem
from meshwright.processes import agree


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled step together with its text from before and after optimization.

    The two texts answer different questions. ``partitioned`` is the program right after the
    partitioner: every collective on its own, with the dtype the program asked for and its own op
    name, duplicate and dead code removed. It says *what is sent and why*, on any backend.
    ``optimized`` is what this backend runs: it says how many launches are left after combining. On
    CPU it has no reduce-scatter, and bf16 collectives are widened to f32, so its bytes are not
    those of a GPU.
    """

    compiled: Any
    facts: ProgramFacts

    @property
    def partitioned(self) -> str:
        """The text right after the partitioner."""
        if self.facts.partitioned:
            return self.facts.partitioned
        text = self.optimized
        partitions = _num_partitions(text) or 1
        if partitions > 1:
            raise EnvironmentProblem(
                f"the compiler did not write the partitioned program of {partitions} devices",
                why="xla_dump_hlo_pass_re=spmd-partitioning produced no file",
                fix="read the optimized program, and compare it only with others of this backend",
            )
        return text

    @property
    def optimized(self) -> str:
        """The text of the program this backend runs."""
        if text := self.optimized_or_none():
            return text
        raise EnvironmentProblem("this backend does not show the text of compiled programs")

    def optimized_or_none(self) -> str | None:
        """Return the text of the program this backend runs; None if the backend has none."""
        return _text(self.compiled) or self.facts.optimized or None

    @property
    def memory(self) -> MemoryUse:
        """The program's memory on each device."""
        return self.facts.memory or memory_of(self.compiled)


def compile_program(
    lowered: Any,
    compiler_options: Mapping[str, Any] | None = None,
    *,
    partitioned: bool = True,
    key: str | None = None,
) -> CompiledProgram:
    """Compile what ``jax.jit(f).lower(...)`` returned, and save its texts.

    With the compilation cache, what is known of a program is kept beside it. Without that, a
    program from the cache is compiled once more. A ``key`` saves reading its text.
    """
    options = dict(compiler_options or {})
    if disk_cache() is None:
        compiled, dumped = _compile(lowered, options, dump=partitioned)
        return CompiledProgram(compiled, ProgramFacts(dumped, None, None))
    key = key or key_of(lowered, options)
    kept = load_facts(key)
    compiled, dumped = _compile(lowered, options, dump=partitioned)
    facts = kept
    if facts is None or not facts.memory or _incomplete(facts, partitioned=partitioned):
        # A program from the cache has no texts, which says nothing about the compiler.
        found = ProgramFacts(dumped or None, _text(compiled) or None, _memory(compiled))
        facts = found.completed(kept)
    # On GPUs processes compile together, and would wait for one that does not.
    if agree(_incomplete(facts, partitioned=partitioned)):
        with no_disk_cache():
            compiled, dumped = _compile(lowered, options, dump=partitioned)
        facts = ProgramFacts(dumped, _text(compiled), _memory(compiled)).completed(kept)
    if kept is None or kept.completed(facts) != kept:
        keep_facts(key, facts)
    return CompiledProgram(compiled, facts)


def _incomplete(facts: ProgramFacts, *, partitioned: bool) -> bool:
    """Whether a program has to be compiled again to know what is needed."""
    if facts.optimized is None:
        return True
    # One device has no partitioner.
    needed = partitioned and _num_partitions(facts.optimized) != 1
    return needed and facts.partitioned is None


def _compile(lowered: Any, options: dict[str, Any], *, dump: bool) -> tuple[Any, str | None]:
    """Return a compiled program and its partitioned text, empty if the compiler wrote none."""
    if not dump:
        return lowered.compile(compiler_options=options or None), None
    with tempfile.TemporaryDirectory(prefix="meshwright-hlo-") as folder:
        options = {
            **options,
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
            "xla_dump_hlo_as_text": True,
            # Tables from device to slice offset are constants that would be elided at > 10 devices.
            "xla_dump_large_constants": True,
        }
        compiled = lowered.compile(compiler_options=options)
        dumps = sorted(Path(folder).glob("*after_spmd-partitioning*.txt"))
        return compiled, dumps[-1].read_text() if dumps else ""


def _num_partitions(text: str) -> int | None:
    """Return over how many devices a program is partitioned; None if there is no text."""
    found = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    return int(found[1]) if found else (1 if text else None)


def _text(compiled: Any) -> str:
    """Return the text of a compiled program; empty if it has none, as from a GPU's cache."""
    try:
        text = compiled.as_text() or ""
    except (NotImplementedError, RuntimeError, ValueError):
        return ""
    return text if "ENTRY " in text else ""


def _memory(compiled: Any) -> MemoryUse | None:
    try:
        return memory_of(compiled)
    except EnvironmentProblem:
        return None


WORTH_POLISHING = 1e11
"""Floating-point operations, over all runs of a program, that take longer in code that is not
polished than polishing takes."""

_NOT_POLISHED = {"xla_backend_optimization_level": 0}
"""Known to every compiler; how a program is partitioned does not change."""

_BY_OLD_EMITTERS = {"xla_cpu_use_fusion_emitters": False}
"""Known to compilers that have new ones for CPUs; together they are four times as fast."""


def known_options(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some compiler options that this compiler knows."""
    return {name: value for name, value in wanted.items() if _is_known(name, value)}


def quick_options(flops: float = 0.0) -> dict[str, Any]:
    """Return options with which CPUs compile a program that runs a few times; none elsewhere.

    They change how machine code is generated, not the partitioned program it is generated from.
    There are none either if all runs together have many ``flops``.
    """
    if flops >= WORTH_POLISHING or jax.default_backend() != "cpu":
        return {}
    return _NOT_POLISHED | known_options(_BY_OLD_EMITTERS)


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value})(0)
    except jax.errors.JaxRuntimeError:
        return False
    return True
