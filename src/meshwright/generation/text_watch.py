"""Watching the text of rows: stop strings, and pieces for those who read along."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.generation.text_settings import TextTokens
from meshwright.generation.token_loop import Ended, Row

BYTES_OF_CHARACTER = 4
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How a tokenizer decodes the first bytes of a character."""


@dataclass(frozen=True)
class Piece:
    """What a row has got since its last piece; it is a sample of a prompt, both by number.

    The text is empty without a tokenizer, and ``ended`` is empty while the row goes on.
    """

    prompt: int
    sample: int
    text: str
    tokens: tuple[int, ...]
    ended: str


OnPiece = Callable[[Piece], None]


@dataclass
class TextWatch:
    """Ends rows at stop strings, and sends their text to ``on_piece`` as it grows."""

    text: TextTokens
    stops: Sequence[str] = ()
    on_piece: OnPiece | None = None
    _seen: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    def __call__(self, row: Row) -> None:
        """Look at the new tokens of a row."""
        key = (row.prompt.number, row.sample)
        before = self._seen.get(key, 0)
        if self.stops:
            self._find_stop(row, before)
        self._seen[key] = len(row.tokens)
        if self.on_piece is None and not row.ended:
            return
        shown = row.text or ""
        if self.text.tokenizer is not None:
            row.text = self._settled(row)
        if self.on_piece is not None:
            new = tuple(row.tokens[before:])
            text = (row.text or "")[len(shown) :]
            self.on_piece(Piece(*key, text, new, str(row.ended or "")))

    def _find_stop(self, row: Row, before: int) -> None:
        """End a row with the token that completes a stop string."""
        # A string may begin inside an earlier token, and a character may take several tokens.
        longest = max(len(stop.encode()) for stop in self.stops)
        start = max(0, before - BYTES_OF_CHARACTER * longest)
        if not self._first_stop(row, start, len(row.tokens)):
            return
        for count in range(before + 1, len(row.tokens) + 1):
            if self._first_stop(row, start, count):
                row.end(Ended.STOP_STRING, count)
                return

    def _first_stop(self, row: Row, start: int, count: int) -> bool:
        text = self.text.continuation(
            [*row.prompt.tokens[-8:], *row.tokens[:start]], row.tokens[start:count]
        )
        return any(stop in text for stop in self.stops)

    def _settled(self, row: Row) -> str:
        """Return the text of a row, without what the next tokens may change or take back."""
        tokens = row.tokens
        if row.ended is Ended.STOP_TOKEN:
            tokens = tokens[:-1]
        text = self.text.continuation(row.prompt.tokens, tokens)
        if row.ended is Ended.STOP_STRING:
            return text[: min(at for stop in self.stops if (at := text.find(stop)) >= 0)]
        if row.ended:
            return text
        text = text.rstrip(UNFINISHED)
        lengths = range(1, max(map(len, self.stops), default=0))
        held = [n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)]
        return text[: len(text) - max(held, default=0)]
