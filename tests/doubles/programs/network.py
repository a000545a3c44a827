"""A network whose step of training JAX compiles for the CPU: network.py [LAYERS].

It prints the seconds from its start, imports included, to its first result.
"""

import sys
import time

started = time.monotonic()

import jax
import jax.numpy as jnp

LAYERS = int(sys.argv[1]) if len(sys.argv) > 1 else 12
WIDTHS = tuple(range(32, 33 + LAYERS))  # of each layer another, so that no two compile to the same


@jax.jit
def step(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Return the loss and its gradients."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x
        for weight in weights:
            y = jax.nn.gelu(y @ weight)
            y = (y - y.mean(axis=-1, keepdims=True)) / (y.std(axis=-1, keepdims=True) + 1e-5)
        return jnp.square(jnp.sort(y)).mean()

    return jax.value_and_grad(loss)(weights)


keys = jax.random.split(jax.random.key(14), len(WIDTHS))
weights = [
    jax.random.normal(key, (width, following)) / width**0.5
    for key, width, following in zip(keys, WIDTHS, WIDTHS[1:], strict=False)
]
value, _ = jax.block_until_ready(step(weights, jnp.ones((16, WIDTHS[0]))))
print(f"result {value:.4f} after {time.monotonic() - started:.1f} s", flush=True)
