"""Dividing blocks into stages: what does not work is refused with what does."""

import pytest

from meshwright.errors import UserError
from meshwright.pipeline.cut import blocks_per_stage


@pytest.mark.parametrize(
    ("blocks", "stages", "chunks", "fix"),
    [
        (6, 4, 1, "write mesh.pipe=2, or use a model with 4 or 8 blocks"),
        (5, 4, 1, "leave out mesh.pipe, or use a model with 4 or 8 blocks"),
        (3, 4, 1, "leave out mesh.pipe, or use a model with 4 blocks"),
        (
            4,
            4,
            2,
            "write pipeline.schedule=1f1b, or write mesh.pipe=2, or use a model with 8 blocks",
        ),
        (
            16,
            4,
            3,
            "write pipeline.num_chunks=2 or 4, or write pipeline.schedule=1f1b, or leave out "
            "mesh.pipe, or use a model with 12 or 24 blocks",
        ),
    ],
)
def test_every_suggestion_divides_the_blocks(blocks, stages, chunks, fix):
    with pytest.raises(UserError) as caught:
        blocks_per_stage(blocks, stages, chunks)
    assert caught.value.fix == fix


def test_blocks_are_divided_evenly():
    assert blocks_per_stage(12, 3) == 4
    assert blocks_per_stage(12, 3, 2) == 2
