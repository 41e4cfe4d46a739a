"""What is found in float32 is found in half precision too, where sums have conversions around."""

import pytest
from program.kernels.attention_forms import NOT_REPLACED, REPLACED
from program.kernels.kernel_runs import assembled, uses_in
from program.kernels.test_attention import FORMS, batch, build, loss


@pytest.fixture(scope="module")
def uses():
    put_together = assembled(build(FORMS), loss, batch(), "xla", wide=False, precision="bf16")
    return put_together.decision.kernels.uses


@pytest.mark.parametrize("name", REPLACED)
def test_attention_is_found(uses, name):
    (use,) = uses_in(name, uses, "attention")
    assert (use.kernel, use.detail, use.reason) == ("xla", REPLACED[name][1], "")


@pytest.mark.parametrize("name", NOT_REPLACED)
def test_what_is_more_than_attention_stays_as_written(uses, name):
    (use,) = uses_in(name, uses, "attention")
    assert use.kernel == ""
    assert NOT_REPLACED[name][1] in use.reason
