"""The last projection and its loss in whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from program.kernels.kernel_runs import assembled, assert_equal, both, uses_in
from program.kernels.loss_forms import CLASSES, mean

import meshwright as mw
from meshwright import Weighted
from meshwright.models import build_model
from meshwright.models.gpt import GPT
from meshwright.program.kernels import chunked_loss
from meshwright.tasks.language_modeling import LanguageModeling

WIDTH = 8


class Rows(nnx.Module):
    """A last projection with a bias; rows have one dim."""

    def __init__(self, rngs=None):
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs or nnx.Rngs(0))

    def __call__(self, x):
        return self.head(x)


class Keeping(Rows):
    """Keeps its logits, as a model that is looked into does."""

    def __init__(self, rngs=None):
        super().__init__(rngs)
        self.last = nnx.Variable(jnp.zeros((4, CLASSES)))

    def __call__(self, x):
        self.last[...] = self.head(x)
        return self.last[...]


class TwoHeads(Rows):
    """Two last projections of one activation; the second is the first one turned around."""

    def __init__(self, rngs=None):
        super().__init__(rngs)
        self.embed = nnx.Embed(CLASSES, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(x), self.embed.attend(x)


def rows(samples, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(samples, WIDTH)).astype(np.float32),
        "labels": random.integers(CLASSES, size=samples, dtype=np.int32),
    }


def model_loss(model, batch):
    return mean(model(batch["x"]), batch)


def two_losses(model, batch):
    first, second = model(batch["x"])
    return mean(first, batch) + 0.5 * mean(second, batch), {"second": mean(second, batch)}


def teacher_and_student():
    return {"teacher": Rows(nnx.Rngs(1)), "student": Rows(nnx.Rngs(2))}


def distilled(models, batch):
    teacher = jax.lax.stop_gradient(models["teacher"](batch["x"]))
    student = jax.nn.log_softmax(models["student"](batch["x"]))
    return -(jax.nn.softmax(teacher) * student).sum(-1).mean()


def in_a_call(model, batch):
    return nnx.jit(model_loss)(model, batch)


@pytest.mark.parametrize(
    ("build", "loss", "samples"),
    [
        pytest.param(TwoHeads, two_losses, 6, id="two heads", marks=pytest.mark.full),
        pytest.param(Rows, in_a_call, 6, id="in a call"),
    ],
)
def test_a_loss_of_a_model_equals_the_plain_program(build, loss, samples):
    found, expected = both(build, loss, rows(samples))
    assert all(use.kernel for use in found.uses)
    assert_equal(found, expected)


def test_as_many_rows_as_classes(monkeypatch):
    """The bias is as long as a column of rows, which is divided; the bias is not."""
    monkeypatch.setattr(chunked_loss, "MOST_ROWS", CLASSES // 2)
    monkeypatch.setattr(chunked_loss, "FEWEST_ROWS", 1)
    assert_equal(*both(Rows, model_loss, rows(CLASSES)))


def test_a_teacher_stays_whole_and_its_student_is_divided():
    found, expected = both(teacher_and_student, distilled, rows(6))
    (use,) = uses_in("student", found.uses, "loss")
    assert use.kernel == "with its gradients"
    assert_equal(found, expected)


def gpt():
    return build_model(
        "gpt",
        rngs=nnx.Rngs(0),
        vocab_size=CLASSES,
        context_length=12,
        num_blocks=1,
        hidden_size=16,
        num_heads=2,
        dropout=0.0,
    )


@pytest.mark.full
def test_a_language_model_with_tied_embeddings_accuracy_and_a_mask():
    task = LanguageModeling(vocab_size=CLASSES, context_length=12)
    batch = task.synthetic_batch(0, 4)
    batch["mask"] = np.random.default_rng(0).integers(2, size=(4, 12)).astype(np.float32)
    found, expected = both(gpt, task.loss, batch)
    kinds = sorted(use.kind for use in found.uses if use.kernel)
    assert kinds == ["activation", "attention", "loss", "norm", "norm", "norm"]
    (use,) = [use for use in found.uses if use.kind == "loss"]
    assert use.kernel == "with its gradients"
    assert_equal(found, expected)


def reason(build, loss, batch, **options):
    (use,) = [
        use
        for use in assembled(build, loss, batch, "xla", **options).decision.kernels.uses
        if use.kind == "loss"
    ]
    return use.reason


def test_logits_that_a_model_keeps_are_made():
    assert reason(Keeping, model_loss, rows(4)) == "the logits are returned"


def test_few_classes_are_not_worth_it():
    small = lambda: nnx.Linear(WIDTH, 100, rngs=nnx.Rngs(0))  # noqa: E731
    assert reason(small, model_loss, rows(4)) == "it has 100 classes, fewer than 256"


@pytest.mark.full
def test_a_weighted_loss():
    def loss(model, batch):
        each = optax_nats(model(batch["x"]), batch)
        return Weighted((each * batch["weight"]).sum(), batch["weight"].sum())

    def optax_nats(logits, batch):
        picked = jnp.take_along_axis(logits, batch["labels"][:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked

    batch = rows(6) | {"weight": np.linspace(0, 1, 6, dtype=np.float32)}
    found, expected = both(Rows, loss, batch)
    assert [use.kernel for use in found.uses] == ["with its gradients"]
    assert_equal(found, expected)


def test_gradients_of_fp16_are_scaled_before_they_are_computed():
    """With the loss they would be computed unscaled, and small ones would be zero."""
    (use,) = [
        use
        for use in assembled(
            Rows, model_loss, rows(8), "xla", wide=False, precision="fp16"
        ).decision.kernels.uses
        if use.kind == "loss"
    ]
    assert use.kernel == "recomputed"


@pytest.mark.full
def test_what_is_sent_belongs_to_the_same_modules_with_kernels():
    task = LanguageModeling(vocab_size=256, context_length=8)
    sizes = {"vocab_size": 256, "context_length": 8, "num_blocks": 1, "hidden_size": 16}

    def sent(kernels):
        trainer = mw.Trainer(
            model=lambda rngs: GPT(**sizes, num_heads=2, dropout=0.0, rngs=rngs),
            loss=task.loss,
            optimizer=optax.sgd(0.1),
            mesh="data=2",
            devices=jax.devices()[:2],
            precision="bf16",
            kernels=kernels,
        )
        modules = trainer.ledger(task.synthetic_batch(0, 4), batch_size=4).axes["data"].modules
        return {name: module.sent_bytes for name, module in modules.items()}

    assert sent("xla") == sent("none")
