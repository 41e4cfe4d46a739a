"""How much memory a compiled program needs on each device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.errors import EnvironmentProblem


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes per device, by what they are used for.

    Attributes:
        argument: the inputs' shards (state and batch).
        output: the outputs' shards.
        alias: outputs that reuse the memory of a donated input; counted in both of the above.
        temp: everything else, such as activations and gathered weights.
    """

    argument: int
    output: int
    alias: int
    temp: int

    @property
    def total(self) -> int:
        """Bytes needed while the program runs.

        A sum, because the peak that the compiler reports does not include ``temp`` on CPU.
        """
        return self.argument + self.output - self.alias + self.temp


def memory_of(compiled: Any) -> MemoryUse:
    """Read the memory of a compiled computation (what ``lowered.compile()`` returned)."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise EnvironmentProblem(
            "this backend does not report the memory of compiled programs",
            fix="compile the same plan on virtual CPU devices, which do: simulate=N",
        )
    return MemoryUse(
        argument=int(stats.argument_size_in_bytes),
        output=int(stats.output_size_in_bytes),
        alias=int(stats.alias_size_in_bytes),
        temp=int(stats.temp_size_in_bytes),
    )
