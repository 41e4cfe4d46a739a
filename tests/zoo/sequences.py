"""Models of sequences: a selective state space, an LSTM, an adapted transformer, routed experts."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from zoo.entry import Entry, integers

VOCABULARY = 64
LENGTH = 12


class SelectiveSSM(nnx.Module):
    """One block of Mamba: a linear recurrence whose coefficients depend on the input."""

    def __init__(self, width, states, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.inner = nnx.Linear(width, 2 * width, rngs=rngs)
        self.step = nnx.Linear(width, width, rngs=rngs)
        self.in_out = nnx.Linear(width, 2 * states, use_bias=False, rngs=rngs)
        self.log_decay = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (width, 1))))
        self.direct = nnx.Param(jnp.ones(width))
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        u, gate = jnp.split(self.inner(self.norm(x)), 2, axis=-1)
        step = nnx.softplus(self.step(u))
        into, out = jnp.split(self.in_out(u), 2, axis=-1)
        decay = jnp.exp(-step[..., None] * jnp.exp(self.log_decay[...]))
        drive = (step * u)[..., None] * into[..., None, :]

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, states = jax.lax.associative_scan(combine, (decay, drive), axis=1)
        y = (states * out[..., None, :]).sum(-1) + self.direct * u
        return x + self.out(y * nnx.silu(gate))


class Mamba(nnx.Module):
    def __init__(self, rngs, width=16, states=4, depth=2):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.blocks = nnx.List([SelectiveSSM(width, states, rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LSTM(nnx.Module):
    def __init__(self, rngs, width=16):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(width, 2 * width, rngs=rngs))
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(2 * width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.drop(self.rnn(self.embed(tokens))))


class AdaptedBlock(nnx.Module):
    """A transformer block whose projections have low-rank adapters."""

    def __init__(self, width, heads, rngs, rank=4):
        self.heads = heads
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.LoRALinear(width, 3 * width, lora_rank=rank, rngs=rngs)
        self.out = nnx.LoRALinear(width, width, lora_rank=rank, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.reshape(batch, length, width))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Adapted(nnx.Module):
    """A frozen language model of which only the adapters are trained."""

    def __init__(self, rngs, width=16, heads=4, depth=2):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (LENGTH, width)))
        self.blocks = nnx.List([AdaptedBlock(width, heads, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class RoutedExperts(nnx.Module):
    """Each token goes to its two best experts; an expert takes no more than its capacity."""

    def __init__(self, width, experts, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (experts, width, 2 * width)))
        self.down = nnx.Param(init(rngs.params(), (experts, 2 * width, width)))

    def __call__(self, x):
        experts, width = self.up.shape[:2]
        tokens = x.reshape(-1, width)
        capacity = 2 * 2 * len(tokens) // experts
        weights, chosen = jax.lax.top_k(nnx.softmax(self.router(tokens)), 2)
        expert = chosen.reshape(-1)
        member = jax.nn.one_hot(expert, experts, dtype=jnp.int32)
        place = ((jnp.cumsum(member, axis=0) - 1) * member).sum(-1)
        # Places beyond the capacity are dropped when written, and zero when read.
        repeated = jnp.repeat(tokens, 2, axis=0)
        slots = jnp.zeros((experts, capacity, width), x.dtype)
        slots = slots.at[expert, place].set(repeated, mode="drop")
        hidden = nnx.gelu(jnp.einsum("ecd,edh->ech", slots, self.up[...]))
        done = jnp.einsum("ech,ehd->ecd", hidden, self.down[...])
        back = done.at[expert, place].get(mode="fill", fill_value=0.0)
        mixed = (back.reshape(-1, 2, width) * weights[..., None]).sum(1)
        return x + mixed.reshape(x.shape)


class Experts(nnx.Module):
    def __init__(self, rngs, width=16, experts=4):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.experts = RoutedExperts(width, experts, rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.experts(self.embed(tokens)))


def next_token_loss(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tokens(random):
    return {"tokens": integers(random, VOCABULARY, LENGTH + 1)}


ZOO = {
    "selective state space": Entry(Mamba, next_token_loss, tokens, blocks=True),
    "LSTM language model": Entry(LSTM, next_token_loss, tokens),
    "LoRA on a frozen transformer": Entry(
        Adapted, next_token_loss, tokens, trainable=nnx.LoRAParam, blocks=True
    ),
    "experts with capacity": Entry(Experts, next_token_loss, tokens),
}
