"""Models that solve equations: a neural ODE, a fixed point, a Fourier operator, a PINN."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from zoo.entry import SAMPLES, Entry, normal


class Field(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


class NeuralODE(nnx.Module):
    """Integrates a learned field by a fixed number of Runge-Kutta steps."""

    def __init__(self, rngs, width=16, steps=5):
        self.steps = steps
        self.first = nnx.Linear(16, width, rngs=rngs)
        self.field = Field(width, rngs)
        self.last = nnx.Linear(width, 16, rngs=rngs)

    def __call__(self, x):
        f, dt = self.field, 1 / self.steps

        def advance(x, _):
            k1 = f(x)
            k2 = f(x + dt / 2 * k1)
            k3 = f(x + dt / 2 * k2)
            k4 = f(x + dt * k3)
            return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        x, _ = jax.lax.scan(advance, self.first(x), None, length=self.steps)
        return self.last(x)


@jax.custom_vjp
def solve(cell, x):
    """Return z = cell(z, x), found by iteration and differentiated implicitly."""

    def proceed(carry):
        z, before, count = carry
        return (jnp.max(jnp.abs(z - before)) > 1e-9) & (count < 40)

    def iterate(carry):
        z, _, count = carry
        return cell(z, x), z, count + 1

    start = jnp.zeros_like(x)
    return jax.lax.while_loop(proceed, iterate, (cell(start, x), start, 0))[0]


def solve_forward(cell, x):
    z = solve(cell, x)
    return z, (cell, x, z)


def solve_backward(saved, gradient):
    cell, x, z = saved
    _, back = jax.vjp(lambda z: cell(z, x), z)
    u = jax.lax.fori_loop(0, 40, lambda _, u: gradient + back(u)[0], gradient)
    _, to_arguments = jax.vjp(lambda cell, x: cell(z, x), cell, x)
    return to_arguments(u)


solve.defvjp(solve_forward, solve_backward)


@jax.tree_util.register_pytree_node_class
class Cell:
    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, z, x):
        return jnp.tanh(z @ self.kernel + x)

    def tree_flatten(self):
        return (self.kernel,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


class DEQ(nnx.Module):
    """One layer of infinite depth."""

    def __init__(self, rngs, width=32):
        self.first = nnx.Linear(16, width, rngs=rngs)
        self.kernel = nnx.Param(0.08 * jax.random.normal(rngs.params(), (width, width)))
        self.last = nnx.Linear(width, 16, rngs=rngs)

    def __call__(self, x):
        return self.last(solve(Cell(self.kernel[...]), self.first(x)))


class SpectralBlock(nnx.Module):
    """Mixes channels by a complex matrix for each low frequency."""

    def __init__(self, width, modes, rngs):
        scale = nnx.initializers.normal(1 / width, dtype=jnp.complex64)
        self.modes = modes
        self.spectral = nnx.Param(scale(rngs.params(), (modes, width, width)))
        self.local = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        low = jnp.fft.rfft(x, axis=1)[:, : self.modes]
        mixed = jnp.einsum("bki,kio->bko", low, self.spectral[...])
        return nnx.gelu(jnp.fft.irfft(mixed, n=x.shape[1], axis=1) + self.local(x))


class FourierOperator(nnx.Module):
    def __init__(self, rngs, width=8, modes=6, depth=2):
        self.lift = nnx.Linear(2, width, rngs=rngs)
        self.blocks = nnx.List([SpectralBlock(width, modes, rngs) for _ in range(depth)])
        self.lower = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        grid = jnp.broadcast_to(jnp.linspace(0, 1, x.shape[1]), x.shape)
        x = self.lift(jnp.stack([x, grid], axis=-1))
        for block in self.blocks:
            x = block(x)
        return self.lower(x)[..., 0]


def regression_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


class PINN(nnx.Module):
    """A solution u(t, x) of a differential equation."""

    def __init__(self, rngs, width=32):
        self.first = nnx.Linear(2, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, t, x):
        hidden = nnx.tanh(self.second(nnx.tanh(self.first(jnp.stack([t, x])))))
        return self.last(hidden)[0]


def heat_loss(model, batch):
    """The residual of u_t = 0.1 u_xx, and the initial condition."""
    t, x = batch["t"], batch["x"]
    u_t = jax.vmap(jax.grad(model))(t, x)
    u_xx = jax.vmap(jax.grad(jax.grad(model, argnums=1), argnums=1))(t, x)
    start = jax.vmap(model)(jnp.zeros_like(x), x)
    return ((u_t - 0.1 * u_xx) ** 2).mean() + ((start - jnp.sin(jnp.pi * x)) ** 2).mean()


def vectors(random):
    return {"x": normal(random, 16), "y": normal(random, 16)}


def collocation(random):
    return {name: random.uniform(size=SAMPLES).astype(np.float32) for name in "tx"}


ZOO = {
    "neural ODE": Entry(NeuralODE, regression_loss, vectors),
    "deep equilibrium": Entry(DEQ, regression_loss, vectors),
    "Fourier operator": Entry(FourierOperator, regression_loss, vectors, blocks=True),
    "PINN": Entry(PINN, heat_loss, collocation),
}
