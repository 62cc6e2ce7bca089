"""JAX: a classifier whose norm and loss are kernels is trained by a jitted step, and as one of ``jax.numpy`` alone is."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository's own kernels are not installed
from kernels.cross_entropy import cross_entropy
from kernels.rms_norm import rms_norm

EPS, RATE, STEPS, HIDDEN, CLASSES = 1e-6, 0.5, 200, 32, 3


def kernels_losses(w1, gain, w2, x, y):
    hidden = jax.nn.relu(rms_norm(x @ w1, gain, EPS))
    return cross_entropy(hidden @ w2, y, 0.1, -100)  # label smoothing, and what is ignored


def jaxs_losses(w1, gain, w2, x, y):
    hidden = x @ w1
    hidden = jax.nn.relu(hidden / jnp.sqrt((hidden**2).mean(1, keepdims=True) + EPS) * gain)
    log_p = jax.nn.log_softmax(hidden @ w2)
    return -0.9 * log_p[jnp.arange(len(y)), y] - 0.1 * log_p.mean(1)


@partial(jax.jit, static_argnums=0)
def step(losses, weights, x, y):
    """A step of gradient descent: the mean loss, and the new weights."""
    loss, gradients = jax.value_and_grad(lambda weights: losses(*weights, x, y).mean())(weights)
    return loss, [each - RATE * gradient for each, gradient in zip(weights, gradients, strict=True)]


def spirals(generator, count):
    """Points on three spirals, and on which of them each is."""
    y = generator.integers(CLASSES, size=count)
    radius = generator.uniform(0.1, 1, count)
    angle = 5 * radius + 2 * np.pi * y / CLASSES + generator.normal(0, 0.1, count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), np.ones(count)], 1).astype(np.float32), y.astype(np.int32)


def main():
    generator = np.random.default_rng(0)
    x, y = map(jnp.asarray, spirals(generator, 600))
    w1, w2 = (jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in ((3, HIDDEN), (HIDDEN, CLASSES)))
    start = [w1, jnp.ones(HIDDEN), w2 / HIDDEN**0.5]
    assert "callback" not in str(jax.make_jaxpr(step, 0)(kernels_losses, start, x, y))  # XLA calls the kernels, not Python
    found = {}
    for losses in (kernels_losses, jaxs_losses):
        weights, found[losses] = start, []
        for _ in range(STEPS):
            loss, weights = step(losses, weights, x, y)
            found[losses].append(float(loss))
    ours, theirs = found.values()
    print("loss:", ", ".join(f"{loss:.3f} after {i} steps" for i, loss in enumerate(ours) if i % 50 == 0 or i == STEPS - 1))
    assert ours[-1] < 0.7 * ours[0] and np.allclose(ours, theirs, rtol=1e-3), (ours, theirs)
    print(f"it falls as with jax.numpy alone: {abs(np.subtract(ours, theirs)).max():.0e} apart at most")


if __name__ == "__main__":
    main()
