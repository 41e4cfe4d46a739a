"""How much memory a compiled program needs, and what is said when a device runs out of it."""

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.compiled.hlo import Computation, Program, Shape, parse_hlo
from meshwright.errors import EnvironmentProblem, MeshwrightError, OutOfMemory, first_line
from meshwright.program.jaxpr.names import module_of
from meshwright.text.units import human_bytes


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes per device, by what they are used for.

    ``alias`` are outputs that reuse the memory of a donated input, counted in both; ``temp`` is
    everything else, such as activations and gathered weights.
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


_NO_BUFFER = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "optimization-barrier"
}  # fmt: skip
"""Operations whose value is a part of another value."""


@dataclass(frozen=True, order=True)
class LargeBuffer:
    """A kind of value that a program keeps in memory; its module has ``*`` for blocks of a list."""

    bytes: int
    count: int
    module: str
    shape: str

    def __str__(self) -> str:
        times = f"{self.count} × " if self.count > 1 else ""
        where = f"in `{self.module}`" if self.module else "outside modules"
        return f"{times}{human_bytes(self.bytes)} {self.shape} {where}"


def largest_buffers(text: str, most: int = 5) -> list[LargeBuffer]:
    """Return the kinds of values of an optimized program that are largest, the largest first.

    Arguments are left out, and so are results, which take the place of donated arguments.
    """
    program = parse_hlo(text)
    results = set(program.entry.root.operands)
    kinds = Counter[tuple[int, str, str]]()
    for computation in _run(program, program.entry):
        for instruction in computation.instructions:
            if instruction.opcode in _NO_BUFFER:
                continue
            if computation is program.entry and instruction.name in results:
                continue
            module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module_of(instruction.op_name))
            for shape in _arrays(instruction.shape):
                dims = ",".join(map(str, shape.dims))
                kinds[shape.bytes, module, f"{shape.dtype}[{dims}]"] += 1
    ordered = sorted(kinds.items(), reverse=True)[:most]
    return [LargeBuffer(size, n, module, shape) for (size, module, shape), n in ordered]


def _run(program: Program, computation: Computation) -> Iterator[Computation]:
    """Yield the computations whose values have memory of their own: loops, not fusions."""
    yield computation
    for instruction in computation.instructions:
        if instruction.opcode in ("while", "conditional", "call"):
            for called in program.run_by(instruction):
                yield from _run(program, called)


def _arrays(shape: Shape) -> Iterator[Shape]:
    if shape.dtype != "tuple":
        yield shape
    for element in shape.elements:
        yield from _arrays(element)


_EXHAUSTED = re.compile(r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY")
_MEMORY = re.compile(r"out of memory|allocat|\bhbm\b", re.IGNORECASE)
_EXACT = re.compile(r"allocat[^\n]*?\(?\b(\d+) ?(?:B\b|bytes)", re.IGNORECASE)
_ROUNDED = re.compile(r"allocat\w*(?: request for)? ([\d.]+) ?([KMGT])(?:iB|B)?\b", re.IGNORECASE)
_USED_OF = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_DEVICE = re.compile(r"device ordinal (\d+)|GPU_(\d+)_bfc")
_FACTORS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Shortage:
    """What a device could not allocate.

    ``asked`` are bytes of the allocation that failed, or of the program that is too large. Bytes
    and the local number of the device are None if JAX's message does not say them.
    """

    asked: int | None
    limit: int | None
    device: int | None
    text: str

    @property
    def sentence(self) -> str:
        """What is missing, as the beginning of a sentence; the same in every process."""
        if self.asked is None:
            return "a device is out of memory"
        if self.limit is not None:
            return f"a device is out of memory: a program needs {human_bytes(self.asked)}"
        return f"a device is out of memory: {human_bytes(self.asked)} could not be allocated"


def find_shortage(error: BaseException | None) -> Shortage | None:
    """Return what was missing if JAX ran out of memory; None for any other exception."""
    while error is not None:
        text = str(error)
        runtime = isinstance(error, jax.errors.JaxRuntimeError)
        if runtime and _EXHAUSTED.search(text) and _MEMORY.search(text):
            return read_shortage(text)
        error = error.__cause__
    return None


def read_shortage(text: str) -> Shortage:
    """Read the message of an exception, as CPUs, GPUs and TPUs word it."""
    exact, rounded, program = _EXACT.search(text), _ROUNDED.search(text), _USED_OF.search(text)
    device = _DEVICE.search(text)
    asked = limit = None
    if program:
        asked, limit = _bytes(program[1], program[2]), _bytes(program[3], program[4])
    elif exact:
        asked = int(exact[1])
    elif rounded:
        asked = _bytes(rounded[1], rounded[2])
    number = next((int(n) for n in device.groups() if n), None) if device else None
    return Shortage(asked, limit, number, first_line(RuntimeError(text)))


def describe_devices(shortage: Shortage, devices: Sequence[Any]) -> list[str]:
    """Say what the device has and uses, or the one that uses most if none is named."""
    facts = [(device, memory_stats(device)) for device in devices]
    known = [(d, s) for d, s in facts if s.get("bytes_limit")]
    named = [(d, s) for d, s in known if getattr(d, "local_hardware_id", None) == shortage.device]
    chosen = named or sorted(known, key=lambda each: -each[1].get("bytes_in_use", 0))[:1]
    if not chosen:
        limit = "" if shortage.limit is None else f", which has {human_bytes(shortage.limit)}"
        kinds = {str(device.device_kind) for device in devices}
        return [f"on a device of kind {', '.join(sorted(kinds))}{limit}"] if kinds else []
    device, stats = chosen[0]
    return [
        f"device {device.id} ({device.device_kind}) gives {human_bytes(stats['bytes_limit'])} to "
        f"JAX, of which {human_bytes(stats.get('bytes_in_use', 0))} are in use"
    ]


def explain_shortage(
    shortage: Shortage, doing: str, *, lines: Iterable[str] = (), fix: str = ""
) -> OutOfMemory:
    """Return the error for a device that is out of memory, with what is known of the program."""
    what = f"{shortage.sentence} while {doing}"
    return OutOfMemory(what, why="\n".join([*lines, f"JAX says: {shortage.text}"]), fix=fix)


@contextmanager
def explaining_shortage(explain: Callable[[Shortage], OutOfMemory]) -> Generator[None]:
    """Turn JAX's exception about memory into the error that ``explain`` returns."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        shortage = find_shortage(error)
        if shortage is None:
            raise
        raise explain(shortage) from error


def tell_shortage(shortage: Shortage, doing: str, fix: str = "") -> OutOfMemory:
    """Return the error where nothing is known about the program but JAX's message."""
    lines = describe_devices(shortage, jax.local_devices())
    return explain_shortage(shortage, doing, lines=lines, fix=fix)


def memory_stats(device: Any) -> dict[str, int]:
    """Return what a device says about its memory; empty if it says nothing."""
    try:
        return device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, AttributeError, NotImplementedError):
        return {}


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _FACTORS[unit.upper()])
