"""Dividing blocks into stages: as evenly as they go, and what does not work is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.pipeline.divide.division import divide_blocks

pytestmark = pytest.mark.usefixtures("command_line")


@pytest.mark.parametrize(
    ("blocks", "stages", "chunks", "fix"),
    [
        (3, 4, 1, "write mesh.pipe=2, or use a model with 4 blocks"),
        (2, 5, 1, "leave out mesh.pipe, or use a model with 5 blocks"),
        (
            4,
            4,
            2,
            "write pipeline.schedule=1f1b, or write mesh.pipe=2, or use a model with 8 blocks",
        ),
        (
            9,
            4,
            3,
            "write pipeline.num_chunks=2, or write pipeline.schedule=1f1b, or write mesh.pipe=2, "
            "or use a model with 12 blocks",
        ),
    ],
)
def test_every_suggestion_divides_the_blocks(blocks, stages, chunks, fix):
    with pytest.raises(UserError) as caught:
        divide_blocks(blocks, stages, chunks)
    assert caught.value.fix == fix


def test_what_is_left_over_goes_to_stages_without_embedding_and_head():
    assert divide_blocks(12, 3).counts == (4, 4, 4)
    assert divide_blocks(6, 4).counts == (1, 2, 2, 1)
    assert divide_blocks(7, 4).counts == (2, 2, 2, 1)
    assert divide_blocks(5, 2, 2).counts == (1, 2, 1, 1)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 20))
def test_each_block_is_on_one_stage_and_stages_are_as_equal_as_they_can_be(stages, chunks, more):
    blocks = stages * chunks + more
    division = divide_blocks(blocks, stages, chunks)
    assert sorted(n for stage in range(stages) for n in division.blocks(stage)) == [*range(blocks)]
    assert division.most - min(division.counts) <= 1
    rows = division.rows()
    assert len(rows) == stages * chunks * division.most
    for stage in range(stages):
        held = rows[stage * chunks * division.most : (stage + 1) * chunks * division.most]
        assert sorted(set(held)) == sorted(division.blocks(stage))
