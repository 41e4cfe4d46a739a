"""Models of images: a diffusion U-Net and a DenseNet."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from zoo.entry import Entry, integers, normal


def conv(inputs, outputs, rngs, **options):
    return nnx.Conv(inputs, outputs, (3, 3), rngs=rngs, **options)


class ResBlock(nnx.Module):
    def __init__(self, inputs, outputs, time, rngs):
        self.norm1 = nnx.GroupNorm(inputs, num_groups=4, rngs=rngs)
        self.conv1 = conv(inputs, outputs, rngs)
        self.time = nnx.Linear(time, outputs, rngs=rngs)
        self.norm2 = nnx.GroupNorm(outputs, num_groups=4, rngs=rngs)
        self.conv2 = conv(outputs, outputs, rngs)
        self.skip = nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)

    def __call__(self, x, t):
        h = self.conv1(nnx.silu(self.norm1(x))) + self.time(t)[:, None, None]
        return self.skip(x) + self.conv2(nnx.silu(self.norm2(h)))


class UNet(nnx.Module):
    """Predicts the noise in an image at a diffusion time."""

    def __init__(self, rngs, width=8):
        self.rngs = rngs
        self.time1 = nnx.Linear(16, 32, rngs=rngs)
        self.time2 = nnx.Linear(32, 32, rngs=rngs)
        self.first = conv(2, width, rngs)
        self.down1 = ResBlock(width, width, 32, rngs)
        self.shrink = conv(width, 2 * width, rngs, strides=2)
        self.middle = ResBlock(2 * width, 2 * width, 32, rngs)
        self.grow = nnx.ConvTranspose(2 * width, width, (2, 2), strides=(2, 2), rngs=rngs)
        self.up1 = ResBlock(2 * width, width, 32, rngs)
        self.norm = nnx.GroupNorm(width, num_groups=4, rngs=rngs)
        self.last = conv(width, 2, rngs)

    def __call__(self, x, t):
        angles = t[:, None] * 100.0 ** (-jnp.arange(8) / 8) * 100
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        t = nnx.silu(self.time2(nnx.silu(self.time1(t))))
        wide = self.down1(self.first(x), t)
        deep = self.middle(self.shrink(wide), t)
        x = self.up1(jnp.concatenate([self.grow(deep), wide], axis=-1), t)
        return self.last(nnx.silu(self.norm(x)))


def denoising_loss(model, batch):
    x = batch["image"]
    t = jax.random.uniform(model.rngs.time(), x.shape[:1])
    noise = jax.random.normal(model.rngs.noise(), x.shape)
    signal = jnp.cos(t * jnp.pi / 2)[:, None, None, None]
    noisy = signal * x + jnp.sqrt(1 - signal**2) * noise
    return jnp.mean((model(noisy, t) - noise) ** 2)


class DenseLayer(nnx.Module):
    def __init__(self, inputs, growth, rngs):
        self.norm = nnx.BatchNorm(inputs, rngs=rngs)
        self.conv = conv(inputs, growth, rngs, use_bias=False)

    def __call__(self, x):
        return jnp.concatenate([x, self.conv(nnx.relu(self.norm(x)))], axis=-1)


class DenseNet(nnx.Module):
    def __init__(self, rngs, width=8, growth=8, layers=3, classes=8):
        self.first = conv(2, width, rngs)
        self.layers = nnx.List(
            [DenseLayer(width + growth * i, growth, rngs) for i in range(layers)]
        )
        self.norm = nnx.BatchNorm(width + growth * layers, rngs=rngs)
        self.head = nnx.Linear(width + growth * layers, classes, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(nnx.relu(self.norm(x)).mean(axis=(1, 2)))


def classification_loss(model, batch):
    nats = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return nats.mean()


def images(random):
    return {"image": normal(random, 8, 8, 2), "label": integers(random, 8)}


ZOO = {
    "diffusion U-Net": Entry(UNet, denoising_loss, images),
    "DenseNet": Entry(DenseNet, classification_loss, images, optax.sgd(0.1, momentum=0.9)),
}
