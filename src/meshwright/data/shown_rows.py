"""Some rows of tokens as text for people, with what is learned of them."""

import numpy as np

from meshwright.data.protocols import Data

MOST_TOKENS = 1000


def shown_rows(data: Data, count: int = 3) -> list[list[tuple[str, bool]]]:
    """Return the first document of some rows, in pieces: their text, and whether it is learned.

    Rows of which everything is learned are not shown.
    """
    tokenizer = data.tokenizer
    if tokenizer is None or data.forward_only or not data.read_ahead:
        return []
    batch = data.batch(0, count)
    if not isinstance(batch, dict) or not {"tokens", "mask"} <= batch.keys():
        return []
    shown = list[list[tuple[str, bool]]]()
    for row in range(count):
        learned = np.append(False, batch["mask"][row] > 0)
        length = 1 + int(np.flatnonzero(learned).max(initial=0))
        if "segment_ids" in batch:
            length = int((batch["segment_ids"][row] == 1).sum())
        tokens, learned = (a[: min(length, MOST_TOKENS)] for a in (batch["tokens"][row], learned))
        cuts = np.flatnonzero(np.diff(learned)) + 1
        parts = zip(np.split(tokens, cuts), np.split(learned, cuts), strict=True)
        shown.append([(tokenizer.decode(part), bool(own[0])) for part, own in parts])
    return shown
