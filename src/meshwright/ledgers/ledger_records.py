"""A ledger: collectives by module, what each axis and module sends, and all of it as text."""

from pydantic import Field
from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.config.base import Frozen
from meshwright.mesh.axes import describe_sizes
from meshwright.text.columns import Columns, Indented, as_text
from meshwright.text.units import human_bytes

LOWEST, HIGHEST = 0.98, 1.05
"""Ratios outside this range are suspicious: above it something is sent needlessly, below it
something that must be sent is missing."""


class Line(Frozen):
    """Collectives of one kind, axis and module, with what they exchange and send per step."""

    axes: list[str]
    kind: str
    module: str
    phase: str
    count: int
    payload_bytes: int
    sent_bytes: int


class Explanation(Frozen):
    """Why a module sends more than the minimum, and how many bytes each device sends for that."""

    sent_bytes: int
    reason: str


class ModuleLedger(Frozen):
    """What one module sends over one axis, what the plan needs, and why it is more.

    ``kinds`` has bytes beyond the minimum, ``reduce`` being all-reduces and reduce-scatters;
    negative where less is sent.
    """

    sent_bytes: int
    minimum_bytes: int
    kinds: dict[str, int] = Field(default_factory=dict[str, int])
    explained: list[Explanation] = Field(default_factory=list[Explanation])


class KindOverlap(Frozen):
    """What collectives of one kind send over one axis, and how much of it while products run."""

    sent_bytes: int
    overlapped_bytes: int
    overlapped: float


class NotOverlapped(Frozen):
    """A collective during which the device computes no product, of one module or several merged."""

    axes: list[str]
    kind: str
    modules: list[str]
    phase: str
    count: int
    sent_bytes: int


class AxisLedger(Frozen):
    """One mesh axis: what each device sends over it, in the stage that sends most, and the minimum.

    ``excess`` says what is beyond the minimum, ``overlapped`` which share of it is sent while the
    device computes products, in the program that runs; null if unknown, or if nothing is sent.
    ``overlap`` is the same by kind of collective, ``reduce`` being all-reduces and reduce-scatters.
    """

    size: int
    sent_bytes: int
    minimum_bytes: int
    ratio: float | None
    excess: list[str]
    modules: dict[str, ModuleLedger] = Field(default_factory=dict[str, ModuleLedger])
    overlapped_bytes: int | None = None
    overlapped: float | None = None
    overlap: dict[str, KindOverlap] = Field(default_factory=dict[str, KindOverlap])

    @property
    def suspicious(self) -> bool:
        """Whether the axis deviates from its minimum."""
        if self.ratio is None:
            return self.sent_bytes > 0
        return not LOWEST <= self.ratio <= HIGHEST


class Ledger(Frozen):
    """The collectives of a compiled step, compared with the theoretical minimum.

    Attributes:
        mesh: axis sizes.
        ratio: sent over minimum bytes, over all axes; null if nothing needs to be sent.
        sent_bytes: bytes each device sends per step; with pipeline stages, in the stage that
            sends most.
        minimum_bytes: bytes the plan needs to send.
        axes: the ledger of each axis.
        lines: all collectives, grouped; with pipeline stages, of a stage that has them.
        argument_bytes: memory of state and batch per device.
        temp_bytes: memory of temporaries per device.
        compile_seconds: compilation time.
        not_overlapped: the largest collectives during which nothing is computed.
        overlap_unknown: why it is not known what overlaps; empty if it is.
    """

    mesh: dict[str, int]
    ratio: float | None
    sent_bytes: int
    minimum_bytes: int
    axes: dict[str, AxisLedger]
    lines: list[Line]
    argument_bytes: int
    temp_bytes: int
    compile_seconds: float
    not_overlapped: list[NotOverlapped] = Field(default_factory=list[NotOverlapped])
    overlap_unknown: str = ""

    @property
    def suspicious(self) -> list[str]:
        """The axes that deviate from their minimum."""
        return [axis for axis, ledger in self.axes.items() if ledger.suspicious]

    def __str__(self) -> str:
        """Return what `meshwright ledger` prints."""
        return as_text(ledger_picture(self))

    def __repr__(self) -> str:
        return f"Ledger(mesh={self.mesh}, sent_bytes={self.sent_bytes}, ratio={self.ratio})"


SHOWN_LINES = 24
SHOWN_BLOCKS = 4
_STAGES_NOTE = "With pipeline stages, these are the bytes of the stage that sends most."

_FAMILIES = {
    "all-gather": "gathers",
    "reduce": "reductions",
    "collective-permute": "permutes",
    "all-to-all": "all-to-alls",
}


def ledger_picture(ledger: Ledger) -> RenderableType:
    """Return what each axis sends, next to the minimum, and the largest collectives."""
    head = Text.assemble(
        (describe_sizes(ledger.mesh), "bold"), ", bytes each device sends per step"
    )
    memory = (
        f"per device: {human_bytes(ledger.argument_bytes)} of state and batch, "
        f"{human_bytes(ledger.temp_bytes)} of temporaries; compiled in {ledger.compile_seconds} s"
    )
    return Group(
        head,
        _axes_table(ledger),
        *([Text(_STAGES_NOTE)] if ledger.mesh.get("pipe", 1) > 1 else []),
        *(Indented(line, 2) for line in [*beyond_minimum(ledger), *_overlap_lines(ledger)]),
        Text(),
        _lines_table(ledger),
        Text(),
        Text(memory),
    )


def _axes_table(ledger: Ledger) -> Columns:
    """Return what each axis sends, next to the minimum."""
    rows = [
        (
            axis,
            str(own.size),
            human_bytes(own.sent_bytes),
            human_bytes(own.minimum_bytes),
            Text(
                "–" if own.ratio is None else f"{own.ratio:.3f}",
                style="bold red" if own.suspicious else "green",
            ),
            _overlapped(own),
        )
        for axis, own in ledger.axes.items()
    ]
    head = ("axis", "devices", "sent", "needed", "ratio", "overlapped")
    return Columns(head, rows, right=head[1:-1])


def _overlapped(own: AxisLedger) -> str:
    """Return which part of what an axis sends is sent while the device computes."""
    shares = [
        f"{part.overlapped:.0%} of {_FAMILIES.get(kind, kind)}"
        for kind, part in own.overlap.items()
    ]
    return ", ".join(shares) or "–"


def beyond_minimum(ledger: Ledger) -> list[str]:
    """Return what is sent beyond the minimum, and why where that is known, a line each."""
    excess = [
        f"beyond the minimum on {axis}: {line}"
        for axis, own in ledger.axes.items()
        for line in own.excess
    ]
    explained = [
        f"{human_bytes(part.sent_bytes)} more on {axis}, {name or 'outside modules'}: {part.reason}"
        for axis, own in ledger.axes.items()
        for name, module in own.modules.items()
        for part in module.explained
    ]
    return excess + explained


def _overlap_lines(ledger: Ledger) -> list[str]:
    """Return the largest collectives during which nothing is computed, or why none are known."""
    if ledger.overlap_unknown and ledger.axes:
        return [f"what overlaps with computing is not known: {ledger.overlap_unknown}"]
    return [
        f"not overlapped on {'×'.join(each.axes)}: {each.kind} of {human_bytes(each.sent_bytes)}"
        + (f" in {each.count} iterations" if each.count > 1 else "")
        + f", {_listed(each.modules)} ({each.phase})"
        for each in ledger.not_overlapped
    ]


def _listed(modules: list[str]) -> str:
    if len(modules) <= SHOWN_BLOCKS:
        return ", ".join(modules) or "outside modules"
    shown = modules[: SHOWN_BLOCKS - 1]
    return f"{', '.join(shown)} and {len(modules) - len(shown)} more"


def _lines_table(ledger: Ledger) -> Columns:
    ordered = sorted(ledger.lines, key=lambda line: -line.sent_bytes)
    rows = [
        (
            line.module or "outside modules",
            line.kind,
            "×".join(line.axes),
            line.phase,
            str(line.count),
            human_bytes(line.sent_bytes),
        )
        for line in ordered[:SHOWN_LINES]
    ]
    if rest := ordered[SHOWN_LINES:]:
        sent = human_bytes(sum(line.sent_bytes for line in rest))
        rows.append((f"… and {len(rest)} smaller", "", "", "", "", sent))
    head = ("module", "kind", "axes", "phase", "count", "sent")
    return Columns(head, rows, right=("count", "sent"))
