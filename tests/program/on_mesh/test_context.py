"""Rows divided over the context axis: the numbers of one device, and what attention sends."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from generation.decoder_models import CACHED, RECOMPUTED, VOCABULARY, Decoder
from program.kernels.kernel_runs import assembled, assert_equal, differentiate
from program.on_mesh import rows_in_processes
from real_processes import run_processes
from small_models import builder, task_batch

import meshwright as mw
from meshwright.ledgers.make_ledger import make_ledger
from meshwright.models.gemma3 import Gemma3
from meshwright.models.llama3 import Llama3
from meshwright.tasks.language_modeling import LanguageModeling

TASK = LanguageModeling()
LENGTH, WIDTH, HEADS, CHANNELS = 16, 16, 4, 8


class Written(nnx.Module):
    """A decoder written out: heads share keys, which are repeated, in a window, soft-capped."""

    def __init__(self, *, kv_heads=1, window=None, cap=None, rngs):
        self.kv_heads, self.window, self.cap = kv_heads, window, cap
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.query = nnx.Linear(WIDTH, HEADS * CHANNELS, rngs=rngs)
        self.key = nnx.Linear(WIDTH, kv_heads * CHANNELS, rngs=rngs)
        self.value = nnx.Linear(WIDTH, kv_heads * CHANNELS, rngs=rngs)
        self.out = nnx.Linear(HEADS * CHANNELS, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens)
        batch, length, _ = x.shape

        def heads(array, count):
            array = array.reshape(batch, length, count, CHANNELS).swapaxes(1, 2)
            return jnp.repeat(array, HEADS // count, axis=1)

        key, value = (heads(layer(x), self.kv_heads) for layer in (self.key, self.value))
        scores = heads(self.query(x), HEADS) @ key.swapaxes(-1, -2)
        scores = scores if self.cap is None else self.cap * jnp.tanh(scores / self.cap)
        back = jnp.arange(length)[:, None] - jnp.arange(length)
        seen = (back >= 0) & (back < (self.window or length))
        mixed = jax.nn.softmax(jnp.where(seen, scores, -1e30)) @ value
        x = x + self.out(mixed.swapaxes(1, 2).reshape(batch, length, HEADS * CHANNELS))
        return self.tokens.attend(x)


def tokens(samples=4, length=LENGTH):
    shape = (samples, length + 1)
    return {"tokens": np.random.default_rng(0).integers(VOCABULARY, size=shape, dtype=np.int32)}


def packed():
    batch = tokens()
    documents = np.sort(np.random.default_rng(1).integers(1, 4, size=(4, LENGTH + 1)), axis=1)
    starts = [[row.tolist().index(number) for number in row] for row in documents]
    places = np.arange(LENGTH + 1) - np.array(starts)
    return {**batch, "segment_ids": documents.astype(np.int32), "positions": places.astype("int32")}


def one_row():
    return {name: rows[:1] for name, rows in packed().items()}


def shifted(model, batch):
    """The loss of a model that reads one token less than the batch has."""
    logits = model(batch["tokens"][:, :-2])
    labels = batch["tokens"][:, 1:-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def llama(kv_heads=2, context_length=LENGTH, num_blocks=1, vocab_size=512, **sizes):
    return lambda rngs=None: Llama3(
        vocab_size=vocab_size,
        context_length=context_length,
        num_blocks=num_blocks,
        hidden_size=WIDTH,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=CHANNELS,
        mlp_size=32,
        rngs=nnx.Rngs(0),
        **sizes,
    )


def written(**options):
    return lambda rngs=None: Written(**options, rngs=nnx.Rngs(0))


def check(build, loss, batch, *meshes, kernels="none", **options):
    """Compare loss, metrics and gradients in float64 with those of one device.

    A mesh may come with the kernels to use on it.
    """
    alone = differentiate(build, loss, batch, "none", mesh="data=1", **options)
    for each in meshes:
        mesh, chosen = (each, kernels) if isinstance(each, str) else each
        assert_equal(differentiate(build, loss, batch, chosen, mesh=mesh, **options), alone)


def test_a_model_that_gathers_its_keys_has_the_numbers_of_one_device():
    # 15 positions, which no axis divides.
    build = written(window=5, cap=3.0)
    check(build, shifted, tokens(), "fsdp=2,context=2,tensor=2", ("data=2,context=4", "xla"))


@pytest.mark.parametrize(
    ("batch", "mesh", "kernels"),
    [
        pytest.param(tokens(1), "context=4", "none", marks=pytest.mark.full, id="tokens"),
        pytest.param(packed(), "fsdp=2,context=4", "xla", id="packed"),
    ],
)
def test_a_model_that_exchanges_heads_has_the_numbers_of_one_device(batch, mesh, kernels):
    check(llama(kv_heads=4), TASK.loss, batch, mesh, kernels=kernels)


def chunks(rngs=None):
    """A decoder that passes a state between chunks of positions, as Mamba 2 does."""
    return Decoder(CACHED["chunks"], rngs=nnx.Rngs(0))


def test_a_model_that_passes_states_on_has_the_numbers_of_one_device():
    check(chunks, TASK.loss, tokens(1), "context=4")
    assert ways(chunks, tokens(1), "context=4") == [
        "scan in mix: each device goes through its own positions, after exchanging their states"
    ]
    with pytest.raises(mw.UserError, match="6 is not divisible by 4"):
        assembled(chunks, TASK.loss, tokens(1, 24), "none", mesh="context=4")


def capped(rngs=None):
    """A decoder whose blocks have soft caps, one of them a window."""
    sizes = {"num_heads": HEADS, "num_kv_heads": 1, "head_dim": CHANNELS, "mlp_size": 32}
    layers = {"num_blocks": 2, "sliding_window": 5, "global_every": 2, "attention_softcap": 3.0}
    return Gemma3(hidden_size=WIDTH, context_length=LENGTH, **sizes, **layers, rngs=nnx.Rngs(0))


MESHES = [
    "context=2",
    "context=4",
    "context=8",
    "data=2,context=4",
    "fsdp=2,context=4",
    "context=2,tensor=2",
    "data=2,context=2,tensor=2",
    "fsdp=2,context=2,tensor=2",
]
CASES = {
    "llama": (llama(), TASK.loss, tokens()),
    "packed": (llama(), TASK.loss, packed()),
    "packed and capped": (capped, TASK.loss, packed()),
    "one sample": (llama(kv_heads=4), TASK.loss, tokens()),
    "odd rows": (llama(), shifted, tokens()),
    "window and soft cap": (written(window=5, cap=3.0), TASK.loss, tokens()),
    "window": (written(window=5), TASK.loss, tokens()),
    "repeated keys": (written(kv_heads=2), TASK.loss, tokens()),
    "gpt": (builder("gpt"), *task_batch("gpt", samples=4)),
    "vit": (builder("vit", patch_size=2), *task_batch("vit", samples=4)),
    "states": (chunks, TASK.loss, tokens(4, 32)),
    "dropout": (builder("gpt", dropout=0.3), *task_batch("gpt", samples=4)),
}


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["none", "xla"])
@pytest.mark.parametrize("name", CASES)
def test_every_mesh_has_the_numbers_of_one_device(name, kernels):
    build, loss, batch = CASES[name]
    check(build, loss, batch, *MESHES, kernels=kernels)


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["none", "xla"])
def test_one_row_of_documents_has_the_numbers_of_one_device(kernels):
    check(llama(1), TASK.loss, one_row(), "context=2", "context=4", "context=8", kernels=kernels)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"sharding": mw.ShardingConfig(remat="full", blocks="scan")},
        {"sharding": mw.ShardingConfig(remat="dots")},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "sharding": mw.ShardingConfig(remat="full")},
        {"sharding": mw.ShardingConfig(zero=1)},
    ],
)
def test_options_of_training_change_nothing(options):
    check(llama(), TASK.loss, packed(), "fsdp=2,context=4", "data=2,context=2", **options)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "full"])
def test_adapters_and_dropout_have_the_numbers_of_one_device(remat):
    sharding, meshes = mw.ShardingConfig(remat=remat), ("fsdp=2,context=4", "context=2,tensor=2")
    loss, batch = task_batch("gpt", samples=4)
    check(builder("gpt", dropout=0.3), loss, batch, *meshes, sharding=sharding)
    trainer = mw.Trainer(
        model=llama(num_blocks=2),
        loss=TASK.loss,
        optimizer=optax.adam(1e-2),
        mesh="fsdp=2,context=2,tensor=2",
        lora=mw.LoRA(rank=2),
        sharding=sharding,
    )
    assert trainer.verify([packed()] * 2, steps=2).equal


REFUSED_DECODERS = {
    *(
        "sorted",
        "lstm",
        "gru",
        "convolution",
        "running_mean",
        "shift",
        "convolution_ahead",
        "shift_ahead",
    ),
    *("reversed_sum", "mean", "norm_over_time", "fourier"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", [*CACHED, *RECOMPUTED])
def test_decoders_as_users_write_them_have_the_numbers_of_one_device_or_are_refused(name):
    mix = {**CACHED, **{n: form for n, (form, _) in RECOMPUTED.items()}}[name]

    def build(rngs=None):
        return Decoder(mix, rngs=nnx.Rngs(0))

    if name not in REFUSED_DECODERS:
        check(build, TASK.loss, tokens(), "data=2,context=4")
        return
    with pytest.raises(mw.UserError, match="context=4"):
        assembled(build, TASK.loss, tokens(), "none", mesh="data=2,context=4")


def excess(build, batch, mesh, kernels, remat="none", loss=TASK.loss, zero=3):
    """Return by how much axes exceed their minimum, if it is more than 5%."""
    sharding = mw.ShardingConfig(remat=remat, min_shard_size=0, zero=zero)
    step = assembled(build, loss, batch, kernels, mesh=mesh, wide=False, sharding=sharding)
    axes = make_ledger(step, batch).axes.items()
    return {name: axis.ratio for name, axis in axes if axis.ratio > 1.05}


SIZES = {"context_length": 64, "num_blocks": 2, "vocab_size": VOCABULARY, "tied_embeddings": False}


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("mesh", ["context=4", "data=2,context=4", "fsdp=2,context=2,tensor=2"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_axis_sends_more_than_the_minimum(kv_heads, mesh, remat):
    assert excess(llama(kv_heads, **SIZES), tokens(8, 64), mesh, "none", remat) == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp=2,context=4", {"zero": 1}),
        ("data=2,fsdp=2,context=2", {"zero": 1}),
        ("fsdp=2,context=4", {"loss": shifted}),
    ],
)
def test_whole_gradients_and_odd_rows_send_no_more(mesh, options):
    assert excess(llama(2, **SIZES), tokens(8, 64), mesh, "none", **options) == {}


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("mesh", ["data=2,context=4", "fsdp=2,context=4"])
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_kernels_send_no_more_than_the_minimum(kv_heads, mesh, remat):
    assert excess(llama(kv_heads, **SIZES), tokens(8, 64), mesh, "xla", remat) == {}


@pytest.mark.full
@pytest.mark.parametrize(("kv_heads", "window"), [(1, None), (2, None), (1, 5), (4, 20)])
def test_kernels_send_keys_once_for_all_heads_that_share_them(kv_heads, window):
    build = written(kv_heads=kv_heads, window=window)
    assert excess(build, tokens(8, 64), "context=8", "xla") == {}


@pytest.mark.full
def test_states_are_exchanged_once():
    step = assembled(chunks, TASK.loss, tokens(), "none", mesh="data=2,context=4", wide=False)
    found = make_ledger(step, tokens()).axes["context"].modules["mix"]
    # Only the positions beside a device's own that its convolution reads are not in the minimum.
    assert {*found.kinds} == {"collective-permute"}


@pytest.mark.full
def test_a_run_goes_on_without_the_axis_and_on_another_one(tmp_path):
    def fit(mesh, steps, folder, resume=None):
        trainer = mw.Trainer(
            model=llama(kv_heads=4), loss=TASK.loss, optimizer=optax.adam(1e-2), mesh=mesh
        )
        where = {"run_dir": tmp_path / folder, "progress": False}
        resumed = {} if resume is None else {"resume": str(tmp_path / resume)}
        return trainer.fit([tokens(8)] * 4, steps=steps, **where, **resumed).losses[steps]

    fit("data=2,context=4", 1, "first")
    fit("data=8", 2, "second", "first")
    fit("data=4,tensor=2", 3, "third", "second")
    resumed = fit("fsdp=2,context=4", 4, "fourth", "third")
    assert resumed == pytest.approx(fit("data=8", 4, "alone"), rel=1e-5)


def test_samples_that_data_does_not_divide_are_evaluated_in_divided_rows():
    trained = mw.Trainer(
        model=llama(),
        loss=TASK.loss,
        optimizer=optax.sgd(0.1),
        mesh="context=2,data=2,tensor=2",
        kernels="xla",
    ).fit(tokens(), steps=1, batch_size=4, eval_data=tokens(7))
    whole, _ = nnx.jit(TASK.loss)(trained.model, tokens(7))
    assert trained.eval[1]["loss"] == pytest.approx(float(whole.mean), rel=1e-6)


@pytest.mark.full
def test_two_processes_read_their_own_samples_and_have_the_losses_of_one(tmp_path):
    program = Path(rows_in_processes.__file__).read_text()
    said = run_processes(program, [str(tmp_path / "two")], count=2)
    for mesh in rows_in_processes.MESHES:
        alone, _ = rows_in_processes.train(mesh, tmp_path / "one", devices=jax.devices()[:4])
        (losses, first), (others, second) = (each[mesh] for each in said)
        assert losses == others
        np.testing.assert_allclose(losses, alone, rtol=1e-6)
        # Parts of a row belong to the same samples; replicas read samples of their own, besides
        # the first batch, of which all read the shapes.
        own = set(first) - set(second)
        assert len(own) == (0 if mesh == "context=4" else 3 * 4)


def ways(build, batch, mesh, kernels="none"):
    step = assembled(build, TASK.loss, batch, kernels, mesh=mesh)
    return step.decision.exchanges.describe()


@pytest.mark.parametrize(
    ("kv_heads", "mesh", "way"),
    [
        (4, "context=2", "exchanges positions for heads, which sends as much as"),
        (4, "context=4", "exchanges positions for heads, which sends 0.50× of"),
        (2, "context=2", "gathers keys and values, which sends 0.67× of"),
        (1, "context=4", "gathers keys and values, because context=4 does not divide"),
    ],
)
def test_attention_exchanges_what_sends_less(kv_heads, mesh, way):
    rows, attention = ways(llama(kv_heads), tokens(), mesh)
    assert rows == f"rows of 16 positions: {16 // int(mesh[-1])} on each device"
    assert attention.startswith(f"attention in blocks.0.attention: {way}")


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "; exchanges half of its queries, so that all devices have equal work"),
        ({"window": 5}, ": fetches 4 keys before its own, because of its window"),
        ({"cap": 3.0}, "; exchanges half of its queries, so that all devices have equal work"),
    ],
)
def test_kernels_read_only_keys_that_their_mask_shows(options, way):
    assert ways(written(**options), tokens(), "context=4", kernels="xla")[1].endswith(way)


def test_packed_documents_are_equal_work_too():
    for batch in (packed(), one_row()):
        assert ways(llama(1), batch, "context=4", kernels="xla")[1].endswith("have equal work")


class Looped(nnx.Module):
    """Attention that reads keys block after block, or queries in chunks of their own."""

    def __init__(self, *, chunks, by_keys, rngs):
        self.chunks, self.by_keys = chunks, by_keys
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens)
        chunks = jnp.swapaxes(x.reshape(len(x), self.chunks, -1, WIDTH), 0, 1)

        def read(carry, keys):
            total, largest, weight = carry
            scores = x @ keys.swapaxes(1, 2)
            new = jnp.maximum(largest, scores.max(-1))
            shown, scale = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
            total = total * scale[..., None] + shown @ keys
            return (total, new, weight * scale + shown.sum(-1)), None

        if self.by_keys:
            lowest, none = jnp.full(x.shape[:2], -1e9), jnp.zeros(x.shape[:2])
            (mixed, _, weight), _ = jax.lax.scan(read, (jnp.zeros_like(x), lowest, none), chunks)
            mixed /= weight[..., None]
        else:
            attend = jax.lax.map(lambda q: jax.nn.softmax(q @ x.swapaxes(1, 2)) @ x, chunks)
            mixed = attend.swapaxes(0, 1).reshape(x.shape)
        return self.tokens.attend(x + mixed)


def looped(chunks, *, by_keys=False):
    return lambda rngs=None: Looped(chunks=chunks, by_keys=by_keys, rngs=nnx.Rngs(0))


def test_chunks_of_queries_are_divided():
    check(looped(4), TASK.loss, tokens(), "context=4", "data=2,context=2")
    way = ways(looped(4), tokens(), "context=4")[-1]
    assert way.endswith("each device goes through its own positions")


REFUSED = {
    "keys in a loop": (looped(2, by_keys=True), (TASK.loss, tokens()), "one block after the other"),
    "an odd loop": (looped(2), (TASK.loss, tokens()), "4 steps, or use"),
    "recurrent": (builder("lstm"), task_batch("lstm", samples=4), "one after the other (scan in"),
    "no attention": (builder("mlp"), task_batch("mlp", samples=4), "finds no positions to divide"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_positions_depend_on_each_other_are_refused(name):
    build, (loss, batch), message = REFUSED[name]
    with pytest.raises(mw.UserError) as error:
        assembled(build, loss, batch, "none", mesh="context=4")
    assert message in str(error.value)


def test_more_parts_than_positions_are_refused():
    with pytest.raises(mw.UserError, match="more parts than a row has positions") as error:
        assembled(written(), TASK.loss, tokens(length=3), "none", mesh="context=4")
    assert "attention reads 3 positions" in str(error.value)


def test_attention_without_values_is_refused_by_its_name():
    def loss(model, batch):
        x = model.tokens(batch["inputs"])
        nearest = jnp.einsum("btd,bsd->bts", x, x).max(-1)
        return TASK.loss(model, batch)[0].total + nearest.mean()

    batch = {"inputs": tokens()["tokens"][:, :-1], "targets": tokens()["tokens"][:, 1:]}
    with pytest.raises(mw.UserError, match="does not know this attention") as error:
        assembled(written(), loss, batch, "none", mesh="context=2")
    assert "dot_general outside all modules" in str(error.value)


def test_options_that_divided_rows_cannot_have_are_refused():
    for mesh, options, other in (
        ("context=2,pipe=2", {}, "pipe=2"),
        ("context=2,data=2", {"gradient_accumulation_steps": 2, "sync_gradients_every": 2}, "sync"),
    ):
        with pytest.raises(mw.UserError, match="cannot be combined with") as error:
            assembled(llama(), TASK.loss, tokens(), "none", mesh=mesh, **options)
        assert other in str(error.value)
