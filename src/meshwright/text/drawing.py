"""Drawings of labelled cells, painted as text for a terminal or as a self-contained SVG."""

from collections import defaultdict
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.text import Text

INK = "#16181d"
"""The colour of text on a cell."""

MARGIN = 24
"""Around an SVG, in user units, which are shown as pixels."""

Box = tuple[float, float, float, float]
"""Left, top, width and height."""

_STYLE = """
.NAME text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.NAME .head { font-size: 16px; font-weight: 600; fill: #1f2328; }
.NAME .axis { font-size: 13px; font-weight: 600; fill: #1f2328; }
.NAME .at { font-size: 12px; fill: #59636e; }
.NAME .id { font-size: 14px; font-weight: 600; fill: #16181d; }
.NAME .number { font-size: 11px; fill: #16181d; }
.NAME .long { font-size: 11.5px; }
.NAME .own { font-size: 9px; fill: #16181d; fill-opacity: .72; }
.NAME .at, .NAME .id, .NAME .number, .NAME .own { font-variant-numeric: tabular-nums; }
.NAME .mid { text-anchor: middle; }
.NAME .end { text-anchor: end; }
.NAME .outline { fill: none; stroke: #1f2328; stroke-width: 2.5; stroke-linecap: round; }
@media (prefers-color-scheme: dark) {
.NAME .head, .NAME .axis { fill: #f0f6fc; }
.NAME .at { fill: #9198a1; }
.NAME .outline { stroke: #f0f6fc; }
}
"""


@dataclass(frozen=True)
class Cell:
    """A filled box with a label, such as a device or an operation.

    ``fill`` is light enough for dark text on light and dark pages; an SVG tells ``about`` on hover.
    """

    label: str
    fill: str
    about: str


class TextPainter:
    """Puts styled pieces of text on lines, in any order."""

    def __init__(self) -> None:
        self._pieces: defaultdict[int, list[tuple[int, str, str]]] = defaultdict(list)

    def label(self, line: int, column: int, text: str, style: str = "") -> None:
        """Write a text that starts in this column."""
        self._pieces[line].append((column, text, style))

    def cell(self, line: int, column: int, text: str, fill: str) -> None:
        """Write a text on a colour."""
        self.label(line, column, text, f"{INK} on {fill}")

    def lines(self, count: int) -> list[Text]:
        """Return the first lines."""
        lines = [Text(no_wrap=True, overflow="crop") for _ in range(count)]
        for number, line in enumerate(lines):
            for column, text, style in sorted(self._pieces[number]):
                line.append(" " * (column - len(line)))
                line.append(text, style)
        return lines


class SvgPainter:
    """Collects the elements of an SVG, which suits light and dark pages."""

    def __init__(self, name: str, head: str) -> None:
        self._name, self._elements = name, list[str]()
        self.label(MARGIN, MARGIN + 10, head, "head")

    def add(self, element: str) -> None:
        """Add an element as it is."""
        self._elements.append(element)

    def label(self, x: float, y: float, text: str, style: str, extra: str = "") -> None:
        """Write a text; ``style`` names classes of the style sheet."""
        self.add(_text(x, y, text, style, extra))

    def box(self, box: Box, fill: str, opacity: float = 1) -> None:
        """Draw a box without a label."""
        self.add(_rect(box, 3, f'fill="{fill}" fill-opacity="{opacity:g}"'))

    def cell(self, box: Box, cell: Cell, *labels: tuple[float, str, str], radius: int) -> None:
        """Draw a cell, with centred texts: distance from the top, text and style."""
        x, y, width, _ = box
        texts = (_text(x + width / 2, y + down, text, f"{s} mid") for down, text, s in labels)
        rect = _rect(box, radius, f'class="cell" fill="{cell.fill}"')
        self.add(f"<g><title>{escape(cell.about)}</title>{rect}{''.join(texts)}</g>")

    def page(self, width: float, height: float, title: str, about: str) -> str:
        """Return the SVG, which describes itself in a title and a sentence."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{self._name}" role="img" '
            f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(about)}</desc>",
            f"<style>{_STYLE.replace('NAME', self._name)}</style>",
            *self._elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _rect(box: Box, radius: int, extra: str) -> str:
    x, y, width, height = box
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
    return f"<rect {size} {extra}/>"


def _text(x: float, y: float, text: str, style: str, extra: str = "") -> str:
    attributes = f'x="{x:g}" y="{y:g}" class="{style}" {extra}'.rstrip()
    return f"<text {attributes}>{escape(text)}</text>"
