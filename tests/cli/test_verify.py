"""What verify prints: the mesh, how microbatches flow, and whether it is equal."""

import pytest

from meshwright.cli.verify import schedule_of
from meshwright.config.schema import Config
from meshwright.plan import make_plan


@pytest.mark.parametrize(
    ("mesh", "pipeline", "said"),
    [
        ({"fsdp": 8}, {}, ""),
        ({"pipe": 4, "fsdp": 2}, {"num_microbatches": 1}, ", 1f1b with 1 microbatch"),
        (
            {"pipe": 4, "fsdp": 2},
            {"schedule": "interleaved"},
            ", interleaved with 16 microbatches and 2 chunks a stage",
        ),
    ],
)
def test_the_schedule_is_named_beside_the_mesh(mesh, pipeline, said):
    kinds = {section: {"kind": "x"} for section in ("model", "task", "data", "optimizer")}
    plan = make_plan(Config.parse({**kinds, "mesh": mesh, "pipeline": pipeline}), 8)
    assert schedule_of(plan.model_dump(mode="json")) == said
