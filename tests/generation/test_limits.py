"""Where models end or look ahead: tables of positions, later tokens, the number of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.errors import UserError
from meshwright.generation.generate import generate
from meshwright.generation.model_facts import how_generated
from meshwright.generation.text_scores import score_documents

TOKENS, ROWS = 32, 12


class Placed(nnx.Module):
    """Looks positions up in a table, without saying how long it is."""

    def __init__(self, read):
        self.tokens = nnx.Embed(TOKENS, 8, rngs=nnx.Rngs(0))
        self.places = nnx.Embed(ROWS, 8, rngs=nnx.Rngs(1))
        self.read = read

    def __call__(self, tokens):
        return self.tokens.attend(self.tokens(tokens) + self.read(self.places, tokens.shape[1]))


READ = {
    "embed": lambda places, count: places(jnp.arange(count)),
    "index": lambda places, count: places.embedding[...][jnp.arange(count)],
    "slice": lambda places, count: places.embedding[...][:count],
}


@pytest.mark.parametrize(
    "name", ["embed", *(pytest.param(name, marks=pytest.mark.full) for name in ("index", "slice"))]
)
def test_rows_end_where_a_table_of_positions_does(name):
    got = generate(Placed(READ[name]), [[1, 2, 3]], max_new_tokens=40)
    assert len(got.tokens[0]) == ROWS - 3
    assert got[0].ended == "the model's context is full"
    assert f"a row has at most {ROWS} tokens" in str(got)
    assert np.isfinite(got[0].log_probs).all()
    assert "recomputed" not in str(got)


def test_a_prompt_past_a_table_is_refused():
    model = Placed(READ["embed"])
    with pytest.raises(UserError, match=r"no room for new tokens\nit has 14 .* context 12"):
        generate(model, [[1] * 14], max_new_tokens=2)
    # What is stated is not believed if the table is shorter.
    got = generate(model, [[1, 2]], max_new_tokens=40, context_length=30)
    assert len(got.tokens[0]) == ROWS - 2
    # A table that is read past its end on purpose is none that ends.
    clipped = Placed(
        lambda places, count: jnp.take(places.embedding[...], jnp.arange(count), 0, mode="clip")
    )
    assert len(generate(clipped, [[1]], max_new_tokens=15).tokens[0]) == 15


class Mixing(nnx.Module):
    """Adds something of all positions to each."""

    def __init__(self, mix):
        self.tokens = nnx.Embed(TOKENS, 8, rngs=nnx.Rngs(0))
        self.mix = mix

    def __call__(self, tokens):
        x = self.tokens(tokens)
        return self.tokens.attend(x + self.mix(x))


def drop_past_capacity(x):
    """Rows compete for as many places as the capacity of an expert, by their scores."""
    count = x.shape[1]
    scores = x[..., 0]
    better = (scores[:, None, :] > scores[:, :, None]).sum(-1)
    return jnp.where((better < count // 2)[..., None], 3 * x, 0)


AHEAD = {
    "mean": (lambda x: x.mean(1, keepdims=True), "reduce_sum in model"),
    "fourier": (lambda x: jnp.fft.fft(x, axis=1).real, "fft"),
    "norm": (lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True), "reduce_sum"),
    "look-ahead": (lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0)))[:, 1:], "slice"),
    "capacity": (drop_past_capacity, ""),
}


def plain(model, prompt, count):
    """Continue a prompt by its own length alone."""
    row = list(prompt)
    likeliest = nnx.jit(lambda model, row: jnp.argmax(model(row)[0, -1]))
    for _ in range(count):
        row.append(int(likeliest(model, np.array([row]))))
    return row[len(prompt) :]


@pytest.mark.parametrize(
    "name", [n if n == "mean" else pytest.param(n, marks=pytest.mark.full) for n in AHEAD]
)
def test_a_model_that_sees_later_tokens_is_recomputed_at_each_length(name):
    mix, operation = AHEAD[name]
    model = Mixing(mix)
    prompts = [[1, 2, 3, 9], [4, 5], [7, 8, 9, 1]]
    with jax.enable_x64(False):
        got = generate(model, prompts, max_new_tokens=4)
    assert got.tokens == [plain(model, prompt, 4) for prompt in prompts]
    (said,) = got.remarks
    assert "a program of its own for each length: the model sees later tokens (" in said
    assert operation in said


def test_shapes_are_enough_to_say_how_a_model_is_generated_from():
    mean = nnx.eval_shape(lambda: Mixing(AHEAD["mean"][0]))
    said = "recomputed: every new token reads all earlier ones again: the model sees later tokens"
    assert how_generated(mean) == f"{said} (reduce_sum in model)"
    running = nnx.eval_shape(lambda: Mixing(lambda x: jnp.cumsum(x, 1)))
    assert how_generated(running) == "cached: each new token is read once"
    assert not how_generated(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))))


def log_length(x):
    return x * np.log(x.shape[1])


def test_scores_do_not_depend_on_padding():
    documents = [np.arange(n, dtype=np.int32) % TOKENS for n in (5, 9, 9)]
    with pytest.raises(UserError, match=r"cannot be scored\nthe model sees later tokens"):
        score_documents(Mixing(AHEAD["mean"][0]), documents, length=16)
    model = Mixing(log_length)
    found = score_documents(model, documents, length=16)
    expected = 0.0
    for own in documents:
        log_probs = jax.nn.log_softmax(model(own[None])[0])
        expected -= float(log_probs[np.arange(len(own) - 1), own[1:]].sum())
    np.testing.assert_allclose(found.nats, expected, rtol=1e-5)
