"""What is found in float32 is found in half precision too, where sums have conversions around."""

import pytest
from program.kernels import loss_forms, test_loss
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


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def losses(request):
    build, data = test_loss.build(test_loss.FORMS), test_loss.make_batch()
    options = {"wide": False, "precision": request.param}
    put_together = assembled(build, test_loss.loss, data, "xla", **options)
    return request.param, put_together.decision.kernels.uses


@pytest.mark.parametrize("name", loss_forms.REPLACED)
def test_a_loss_is_found(losses, name):
    precision, uses = losses
    (use,) = uses_in(name, uses, "loss")
    # The scale of the loss in fp16 is applied before its gradients are computed.
    expected = loss_forms.REPLACED[name][1] if precision == "bf16" else "recomputed"
    assert (use.kernel, use.reason) == (expected, "")
