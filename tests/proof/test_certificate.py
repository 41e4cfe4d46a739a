"""How a certificate is printed: the verdict, the mesh, and every comparison."""

import pytest

from meshwright.config.schema import Config
from meshwright.plan import make_plan
from meshwright.proof import Certificate, Comparison


def plan_of(mesh, pipeline=None):
    kinds = {section: {"kind": "x"} for section in ("model", "task", "data", "optimizer")}
    return make_plan(Config.parse({**kinds, "mesh": mesh, "pipeline": pipeline or {}}), 8)


def certificate_of(plan, *, loss_difference=1.5e-16, null_leaves=()):
    equal = loss_difference <= 1e-10
    loss = Comparison(
        what="loss",
        equal=equal,
        tolerance=1e-10,
        worst="step 2",
        difference=loss_difference,
        first_different=None if equal else "step 2",
        first_difference=None if equal else loss_difference,
    )
    gradients = Comparison(
        what="gradients", equal=True, tolerance=3e-5, worst="up.kernel", difference=2e-7
    )
    return Certificate(
        equal=equal,
        mesh=plan.mesh,
        plan=plan.model_dump(mode="json"),
        steps=2,
        parameters=1234,
        float64=[loss],
        null_leaves=list(null_leaves),
        own_precision=[gradients],
        as_written=[gradients],
        versions={"jax": "0.10.2"},
        date="2026-01-02T03:04:05+00:00",
    )


def test_a_certificate_is_printed_in_a_few_lines():
    certificate = certificate_of(plan_of({"fsdp": 4, "tensor": 2}))
    gradients = "  gradients: equal, largest difference 2.0e-07 (up.kernel), tolerance 3.0e-05"
    assert str(certificate).splitlines() == [
        "fsdp=4 × tensor=2: equal to one device",
        "float64, 2 steps of 1,234 parameters",
        "  loss: equal, largest difference 1.5e-16 (step 2), tolerance 1.0e-10",
        "precision no, 2 steps, one by one",
        gradients,
        "the loss as written, float32, one device",
        gradients,
        "jax 0.10.2, 2026-01-02T03:04:05+00:00",
    ]


def test_a_failed_certificate_says_so_first_and_names_the_difference():
    certificate = certificate_of(plan_of({"fsdp": 8}), loss_difference=0.25)
    first, _, loss, *_ = str(certificate).splitlines()
    assert first == "fsdp=8: NOT equal to one device"
    assert loss == "  loss: `step 2` differs by 2.50e-01, more than 1.0e-10"


def test_leaves_without_a_gradient_are_listed():
    names = ["a.bias", "b.bias", "c.bias", "d.bias"]
    text = str(certificate_of(plan_of({"fsdp": 8}), null_leaves=names))
    assert (
        "4 leaves with a true gradient of zero, compared to the global norm: "
        "a.bias, b.bias, c.bias, …\n" in text
    )
    assert "true gradient" not in str(certificate_of(plan_of({"fsdp": 8})))


def test_the_repr_is_one_short_line():
    certificate = certificate_of(plan_of({"fsdp": 8}))
    assert repr(certificate) == "Certificate(equal=True, mesh={'fsdp': 8}, steps=2)"


@pytest.mark.parametrize(
    ("mesh", "pipeline", "configuration"),
    [
        ({"fsdp": 8}, {}, "fsdp=8"),
        (
            {"pipe": 4, "fsdp": 2},
            {"num_microbatches": 1},
            "pipe=4 × fsdp=2, 1f1b with 1 microbatch",
        ),
        (
            {"pipe": 4, "fsdp": 2},
            {"schedule": "interleaved"},
            "pipe=4 × fsdp=2, interleaved with 16 microbatches and 2 chunks per stage",
        ),
    ],
)
def test_the_schedule_is_named_after_the_mesh(mesh, pipeline, configuration):
    assert certificate_of(plan_of(mesh, pipeline)).configuration() == configuration
