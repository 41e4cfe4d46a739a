"""Derived caches: logits of new tokens equal those of whole rows, or are recomputed and why."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from generation.decoder_models import (
    CACHED,
    HEADS,
    RECOMPUTED,
    VOCABULARY,
    WIDTH,
    Decoder,
    Translator,
    Twice,
)
from hf_folders import HF
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.config.compose import compose_config, validate
from meshwright.errors import UserError
from meshwright.generation import traced_decoder
from meshwright.generation.make_decoder import make_decoder
from meshwright.generation.row_placement import RowPlacement
from meshwright.generation.token_decoder import split_model, with_source
from meshwright.program.evaluate.widen import wide_evaluator
from meshwright.program.kernels import attention_by_rows, fused_attention
from meshwright.recipe import make_model_source

LENGTH, PROMPT = 24, 12
EVERY_DAY = ("window", "lstm")
FULL = ("chunks_mask", "chunks_state", "chunks_decay", "fourier", "sorted", "length")


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def largest_difference(model, vocabulary, length, source=(), mesh=None, kernel=""):
    """Return how far cached logits are from those of whole rows, in rows of several lengths."""
    split = split_model(model, source=source)
    lengths = np.array([5, 9, 2] if mesh is None else [5, 9, 2, 7, 1, 12, 4, 3], np.int32)
    rows = len(lengths)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (rows, length)).astype(np.int32)
    row = jax.vmap(lambda row, own: split.logits_of(with_source(split.weights, own), row[None])[0])
    whole = np.asarray(jax.jit(row)(tokens, source))
    placement = RowPlacement(mesh)
    if mesh is not None:
        split = split_model(sharded(model, mesh), source=source)
        split = replace(split, weights=placement.place(split)[1])
    decoder = make_decoder(split, length, divided=placement.divides_weights, kernel=kernel)
    weights = decoder.prepare(split.weights)
    assert not decoder.reason
    prompts = np.where(np.arange(PROMPT) < lengths[:, None], tokens[:, :PROMPT], 7)
    start = jax.jit(lambda w, *given: placement.rows(decoder.start(w, *placement.rows(given))))
    logits, cache = start(weights, prompts.astype(np.int32), lengths, source)
    worst = abs(np.asarray(logits) - whole[range(rows), lengths - 1]).max()
    step = jax.jit(lambda *given: placement.rows(decoder.step(*given)))
    for ahead in range(length - lengths.min()):
        at = np.minimum(lengths + ahead, length - 1)
        logits, cache = step(weights, cache, tokens[range(rows), at], at)
        going = np.flatnonzero(lengths + ahead < length)
        worst = max(worst, abs(np.asarray(logits)[going] - whole[going, at[going]]).max())
    return worst / abs(whole).max()


def sharded(model, mesh):
    """Return a model with its weights over all axes of a mesh, as training leaves them."""
    graphdef, state = nnx.split(model)

    def place(weight):
        first = "pipe" if "pipe" in mesh.shape else "fsdp" if "fsdp" in mesh.shape else "data"
        axes = {0: first, weight.ndim - 1: "tensor"} if weight.ndim > 1 else {}
        fits = {d: a for d, a in axes.items() if weight.shape[d] % mesh.shape.get(a, 10**9) == 0}
        spec = PartitionSpec(*(fits.get(d) for d in range(weight.ndim)))
        return jax.device_put(weight, NamedSharding(mesh, spec))

    return nnx.merge(graphdef, jax.tree.map(place, state))


@pytest.mark.full
def test_an_encoder_runs_once():
    source = np.random.default_rng(1).integers(1, VOCABULARY, (3, 7)).astype(np.int32)
    source[1, 4:] = 0
    model = Translator(rngs=nnx.Rngs(0))
    # With a kernel for prompts, which the encoder's attention and that across do not suit.
    assert largest_difference(model, VOCABULARY, LENGTH, (source,), kernel="xla") < 1e-13
    split = split_model(model, source=(source,))
    decoder = make_decoder(split, LENGTH)
    weights = decoder.prepare(split.weights)
    prompts = np.ones((3, 4), np.int32)
    _, cache = jax.eval_shape(decoder.start, weights, prompts, np.full(3, 4), (source,))
    step = jax.make_jaxpr(decoder.step)(weights, cache, np.ones(3, np.int32), np.full(3, 4))
    # Of three softmaxes, that of the encoder is missing; keys and values across are in the cache.
    assert [eqn.primitive.name for eqn in step.eqns].count("exp") == 2
    assert {(3, 1, 7, HEADS, WIDTH // HEADS)} <= {each.shape for each in cache["source"]}


@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.full) for n in CACHED]
)
def test_cached_logits_equal_those_of_whole_rows(name):
    model = Decoder(CACHED[name], rngs=nnx.Rngs(0))
    assert largest_difference(model, VOCABULARY, LENGTH) < 1e-13


@pytest.mark.parametrize("name", ["learned_bias", pytest.param("softcap", marks=pytest.mark.full)])
def test_prompts_are_read_without_their_scores(name, monkeypatch):
    monkeypatch.setattr(attention_by_rows, "ROWS", 5)
    lengths = list[int]()

    def run(operands, attend, query, *others):
        lengths.append(query.shape[1])
        return fused_attention.run_attention(operands, attend, query, *others)

    monkeypatch.setattr(traced_decoder, "run_attention", run)
    model = Decoder(lambda rngs: Twice(CACHED[name], rngs), rngs=nnx.Rngs(0))
    assert largest_difference(model, VOCABULARY, LENGTH, kernel="xla") < 1e-13
    assert lengths == [PROMPT]


def test_a_window_bounds_the_cache():
    model = make_model_source(validate(compose_config(["model=gemma3_tiny", "model.num_blocks=2"])))
    split = split_model(nnx.eval_shape(lambda: model(nnx.Rngs(0))))
    decoder = make_decoder(split, 128)
    weights = jax.eval_shape(decoder.prepare, split.weights)
    given = np.ones((3, 40), np.int32), np.full(3, 40)
    _, cache = jax.eval_shape(decoder.start, weights, *given)
    # Keys and values; every second block sees all positions, the others 16.
    assert [each.shape[3] for each in cache["rows"]] == [128, 128, 16, 16]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n in FULL else n for n in RECOMPUTED]
)
def test_what_depends_on_later_positions_is_recomputed(name):
    mix, reason = RECOMPUTED[name]
    decoder = make_decoder(split_model(Decoder(mix, rngs=nnx.Rngs(0))), LENGTH)
    assert reason in decoder.reason
    assert decoder.reason


def test_the_reason_names_operation_and_module():
    decoder = make_decoder(split_model(Decoder(RECOMPUTED["mean"][0], rngs=nnx.Rngs(0))), LENGTH)
    assert decoder.reason == "the model sees later tokens (reduce_sum in mix)"


@pytest.mark.parametrize("name", ["fourier", "written_out"])
def test_a_model_that_takes_only_some_lengths_is_recomputed_or_refused(name):
    class Some(Decoder):
        def __call__(self, tokens):
            assert tokens.shape[1] % 6 == 0, "lengths are multiples of 6"
            return super().__call__(tokens)

    if name == "fourier":
        with pytest.raises(UserError, match=r"sees later tokens(.|\n)*multiples of 6"):
            make_decoder(split_model(Some(RECOMPUTED[name][0], rngs=nnx.Rngs(0))), LENGTH)
        return
    decoder = make_decoder(split_model(Some(CACHED[name], rngs=nnx.Rngs(0))), LENGTH)
    assert "called with 23 tokens" in decoder.reason
    assert "multiples of 6" in decoder.reason


class Widened(nnx.Module):
    """A model with everything in float64, also what it computes in float32 on purpose."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *given):
        graphdef, state = nnx.split(self.model)
        leaves, tree = jax.tree.flatten(state)

        def run(leaves, *given):
            model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves), copy=True)
            model.eval()
            return model(*given)

        closed = jax.make_jaxpr(run)(leaves, *given)
        return wide_evaluator().run(closed, [*leaves, *given])[0]


TEN = ("flax", "written_out", "rotary_table", "alibi", "softcap", "compressed", "chunks", "lstm",
       "parallel", "translator", "window")  # fmt: skip
MESHES = ("data=8", "fsdp=4,tensor=2", "pipe=2,data=4")


def built(mesh):
    return mw.build_mesh({axis: int(n) for axis, n in (p.split("=") for p in mesh.split(","))})


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", TEN)
def test_cached_logits_are_the_same_on_any_mesh(name, mesh):
    made, source = built(mesh), ()
    if name == "translator":
        model = Translator(rngs=nnx.Rngs(0))
        source = (np.random.default_rng(1).integers(1, VOCABULARY, (8, 7)).astype(np.int32),)
    else:
        model = Decoder(CACHED[name], rngs=nnx.Rngs(0))
    # Flax divides the scores by a square root in float32.
    model = Widened(model)
    assert largest_difference(model, VOCABULARY, LENGTH, source, made) < 1e-10


FAMILIES = ("gpt2_nano", "llama3_tiny", "gemma3_tiny", "qwen3_tiny", "moe_tiny", "lstm_tiny",
            "stacked_gpt_tiny")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma2", "mistral", "phi3", "qwen2"])
def test_every_family_of_published_weights_has_a_cache(name):
    with jax.enable_x64(False):
        assert largest_difference(mw.load_model(HF / name), 95, 62) < 3e-6


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, *MESHES])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_cache(name, mesh):
    config = validate(compose_config([f"model={name}"]))
    model = Widened(make_model_source(config)(nnx.Rngs(0)))
    made = None if mesh is None else built(mesh)
    assert largest_difference(model, 100, 62, (), made) < 1e-10
