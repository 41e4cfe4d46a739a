"""XLA's program text (HLO), read into plain records."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.errors import UserError

_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_CALLS = ("to_apply", "calls")
_RUN_BY = {
    "while": ("condition", "body"),
    "conditional": _BRANCHES,
    **dict.fromkeys(("call", "fusion", "async"), _CALLS),
}
CALL_ROLES = ("body", "condition", *_CALLS, *_BRANCHES)
"""How an instruction may refer to the computations it calls."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The type of one value: an array, or a tuple of shapes, whose dtype is ``tuple``.

    A bounded dynamic dim counts as its bound; the layout is the text in braces after the dims.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    layout: str = ""
    elements: tuple[Shape, ...] = ()

    @property
    def size(self) -> int:
        """Number of scalars in an array."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Logical bytes, without the padding of tiles; for a tuple, the sum of its elements."""
        if self.dtype == "tuple":
            return sum(element.bytes for element in self.elements)
        return -(-self.size * dtype_bits(self.dtype) // 8)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    ``literal`` is the text in the parentheses of a parameter or a constant, which have no operands;
    ``called`` are the computations it refers to, by role (``body``, ``to_apply``, …); ``op_name``
    says where it comes from in the traced program: ``jit(f)/jvp(~mlp)/dot_general``.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...] = ()
    literal: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    called: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    op_name: str = ""
    is_root: bool = False


@dataclass(frozen=True)
class Computation:
    """A named list of instructions in an order that defines every value before its use."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Positions of instructions by name."""
        return {instruction.name: n for n, instruction in enumerate(self.instructions)}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For each value, the instructions that read it."""
        users: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(readers) for name, readers in users.items()}

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Parameters by their number."""
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])


@dataclass(frozen=True)
class Program:
    """A whole HLO module: its computations, where it starts, and how many devices share it."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_partitions: int

    def called_by(self, instruction: Instruction, *roles: str) -> list[Computation]:
        """Return the computations an instruction calls in these roles, in the order written."""
        names = [name for role in roles for name in instruction.called.get(role, ())]
        return [self.computations[name] for name in names]

    def run_by(self, instruction: Instruction) -> list[Computation]:
        """Return what a loop, branch or call runs; not what is applied to elements, as in sums."""
        return self.called_by(
            instruction, *_RUN_BY.get(instruction.opcode.removesuffix("-start"), ())
        )


def dtype_bits(dtype: str) -> int:
    """Bits of one scalar: 16 for ``bf16``, 8 for ``f8e4m3fn`` and ``pred``, 0 for tokens."""
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def parse_hlo(text: str) -> Program:
    """Read the text of an HLO module, optimized or not."""
    computations: dict[str, Computation] = {}
    entry = header = ""
    name, body = "", dict[str, Instruction]()
    for line in text.splitlines():
        if opening := _COMPUTATION.match(line):
            name, body = opening["name"], {}
            entry = name if opening["entry"] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(body.values()))
            name = ""
        elif name and (instruction := _read_instruction(line)):
            for operand in instruction.operands:
                _spell_out(body, operand)
            body[instruction.name] = instruction
        elif line.startswith("HloModule "):
            header = line
    if entry not in computations:
        raise UserError("this text is not an HLO module", why="it has no ENTRY computation")
    partitions = re.search(r"num_partitions=(\d+)", header)
    return Program(
        computations=computations,
        entry=computations[entry],
        num_partitions=int(partitions[1]) if partitions else 1,
    )


def trip_count(program: Program, caller: Computation, loop: Instruction) -> int | None:
    """Return how often a ``while`` in ``caller`` runs its body; None if the text does not say.

    Optimized text carries ``known_trip_count``. Text from before the optimizer does not, so the
    count is read from a counter that starts at a constant, grows by a constant, and is compared
    with a value that the loop does not change.
    """
    known = re.search(
        r'"known_trip_count":\{"n":"(\d+)"', loop.attributes.get("backend_config", "")
    )
    if known:
        return int(known[1])
    (condition,) = program.called_by(loop, "condition")
    (body,) = program.called_by(loop, "body")
    test = condition.root
    if test.opcode != "compare" or test.attributes.get("direction") != "LT":
        return None
    counter = carried_index(condition, test.operands[0])
    limit = _integer(condition, test.operands[1])
    if limit is None:
        index = carried_index(condition, test.operands[1])
        limit = _integer(caller, carried_in(caller, loop, body, index))
    start = _integer(caller, _initial(caller, loop, counter))
    step = _counter_step(body, counter)
    if limit is None or start is None or step is None:
        return None
    return max(0, -(-(limit - start) // step))


_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\s*([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def _read_instruction(line: str) -> Instruction | None:
    line = _INDEX_COMMENT.sub("", line)
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    shape, end = _read_shape(line, head.end())
    opcode = _OPCODE.match(line, end)
    assert opcode, f"no opcode in: {line}"
    arguments, end = _split(line, opcode.end())
    rest, _ = _split(line, end + 1)
    parts = (part.partition("=") for part in rest)
    attributes = {key.strip(): value for key, sign, value in parts if sign}
    is_leaf = opcode[1] in ("parameter", "constant")
    return Instruction(
        name=head["name"],
        opcode=opcode[1],
        shape=shape,
        # Long text writes the operand's shape before its name.
        operands=() if is_leaf else tuple(a.split()[-1].removeprefix("%") for a in arguments),
        literal=line[opcode.end() : end] if is_leaf else "",
        attributes=attributes,
        called={
            role: tuple(re.findall(r"[\w.\-]+", attributes[role]))
            for role in CALL_ROLES
            if role in attributes
        },
        op_name=_op_name(attributes.get("metadata", "")),
        is_root=bool(head["root"]),
    )


def _spell_out(body: dict[str, Instruction], operand: str) -> None:
    """Add the get-tuple-element that newer text abbreviates to ``%value#2`` where it is used."""
    source, sign, index = operand.rpartition("#")
    if not sign or operand in body:
        return
    _spell_out(body, source)
    body[operand] = Instruction(
        name=operand,
        opcode="get-tuple-element",
        shape=body[source].shape.elements[int(index)],
        operands=(source,),
        attributes={"index": index},
        op_name=body[source].op_name,
    )


def _read_shape(text: str, at: int) -> tuple[Shape, int]:
    """Read the shape at ``at``; return it with the position after it."""
    while text[at] in " ,":
        at += 1
    if text[at] != "(":
        array = _ARRAY.match(text, at)
        assert array, f"no shape in: {text[at : at + 80]}"
        dims = tuple(int(d.strip().removeprefix("<=")) for d in array[2].split(",") if d.strip())
        return Shape(array[1], dims, array[3] or ""), array.end()
    elements: list[Shape] = []
    at += 1
    while text[at] != ")":
        element, at = _read_shape(text, at)
        elements.append(element)
    return Shape("tuple", elements=tuple(elements)), at + 1


def _split(text: str, start: int) -> tuple[list[str], int]:
    """Split at the commas of one nesting level, up to its closing bracket or the end of text."""
    parts: list[str] = []
    depth, last, end = 0, start, len(text)
    for token in _STRUCTURE.finditer(text, start):
        sign = token[0]
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            if depth == 0:
                end = token.start()
                break
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(text[last : token.start()])
            last = token.end()
    parts.append(text[last:end])
    return [part.strip() for part in parts if part.strip()], end


def _op_name(metadata: str) -> str:
    match = _OP_NAME.search(metadata)
    if not match or "\\" not in match[1]:
        return match[1] if match else ""
    # Quotes and the bytes of non-ASCII text are escaped as in C.
    raw = match[1].encode("ascii", "backslashreplace").decode("unicode_escape")
    return raw.encode("latin-1", "replace").decode("utf-8", "replace")


_SAME_VALUE = ("copy", "convert", "bitcast", "reshape")


def _resolve(computation: Computation, name: str) -> Instruction | None:
    """Return the instruction a value comes from, through copies and casts."""
    instruction = computation.by_name.get(name)
    while instruction and instruction.opcode in _SAME_VALUE:
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction


def _integer(computation: Computation, name: str | None) -> int | None:
    source = None if name is None else _resolve(computation, name)
    if source and source.opcode == "constant" and re.fullmatch(r"-?\d+", source.literal):
        return int(source.literal)
    return None


def carried_index(computation: Computation, name: str) -> int | None:
    """Return the index in the loop's tuple that ``name`` is an element of, if it is one."""
    element = _resolve(computation, name)
    if not element or element.opcode != "get-tuple-element":
        return None
    state = _resolve(computation, element.operands[0])
    return int(element.attributes["index"]) if state and state.opcode == "parameter" else None


def _initial(caller: Computation, loop: Instruction, index: int | None) -> str | None:
    """Return what a loop starts with at ``index`` of its tuple, by its name in the caller."""
    start = _resolve(caller, loop.operands[0])
    if index is None or not start or start.opcode != "tuple":
        return None
    return start.operands[index]


def carried_in(
    caller: Computation, loop: Instruction, body: Computation, index: int | None
) -> str | None:
    """Return the caller's name of the value at ``index`` if the body does not change it."""
    if index is None or body.root.opcode != "tuple":
        return None
    unchanged = carried_index(body, body.root.operands[index]) == index
    return _initial(caller, loop, index) if unchanged else None


def _counter_step(body: Computation, index: int | None) -> int | None:
    """Return the positive constant that the body adds to the value at ``index``."""
    if index is None or body.root.opcode != "tuple":
        return None
    update = _resolve(body, body.root.operands[index])
    if not update or update.opcode != "add":
        return None
    for counter, step in (update.operands, update.operands[::-1]):
        amount = _integer(body, step)
        if carried_index(body, counter) == index and amount is not None and amount > 0:
            return amount
    return None
