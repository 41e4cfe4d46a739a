"""Tokens in the cache: those of earlier versions, written once, never damaged, never whole."""

import json
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshwright.data.jsonl import JsonLines
from meshwright.data.parquet import ParquetRows
from meshwright.data.text import text_source

EARLIER = {
    "jsonl documents": ("58ec449399d261ab", (3531714980, 2028611516, 2692877777)),
    "jsonl stream": ("ab41f31f03b69cd4", (378530305,)),
    "jsonl ids": ("9f35f1778ef547a9", (7669635, 1938822504, 3085734755)),
    "parquet": ("58ec449399d261ab", (3531714980, 2028611516, 2692877777)),
    "text": ("84ef25fc9a1867f5", (226454991,)),
    "text documents": ("dbb485f6737fb0e5", (2848477197, 4030880013, 2527521254)),
}
"""Fingerprint, and checksums of all rows, from before there was a cache."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder with the same texts as JSON Lines, a table and text files."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(7)
    sizes = random.integers(0, 90, 400)
    texts = ["".join(chr(97 + n) for n in random.integers(0, 26, size)) for size in sizes]
    records = [json.dumps({"text": t, "ids": [len(t), 1, 2]}) + "\n" for t in texts]
    (folder / "t.jsonl").write_text("".join(records))
    pq.write_table(pa.table({"text": texts}), folder / "t.parquet")
    (folder / "texts").mkdir()
    for number, text in enumerate(texts[:50]):
        (folder / "texts" / f"{number:03}.txt").write_text(text * 20)
    return folder
