"""JAX with one process a node. What a program owes mgpu are three habits, marked (1) to (3) below.

It runs without mgpu as well: `python jax_data_parallel.py` saves nothing and trains to the end.
"""

import argparse
import os
import signal
from pathlib import Path

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

CHECKPOINTS = os.environ.get("MGPU_CHECKPOINT_DIR")  # where `step-<n>` folders go
RESUME = os.environ.get("MGPU_RESUME_DIR")  # a checkpoint of ours that mgpu has fetched and verified
State = dict[str, jax.Array]


def batch(step: int, process: int, processes: int) -> tuple[np.ndarray, np.ndarray]:
    """Depends on these numbers alone: a resumed run sees what the other one would have seen."""
    x = np.random.default_rng(step * processes + process).uniform(-1, 1, (128, 2)).astype(np.float32)
    return x, np.sin(3 * x[:, :1]) * np.cos(3 * x[:, 1:])


def loss_of(weights: State, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ weights["up"] + weights["bias"]) @ weights["down"] - y) ** 2)


@jax.jit
def train(weights: State, momentum: State, x: jax.Array, y: jax.Array) -> tuple[State, State, jax.Array]:
    """The mean over the batch of all processes: XLA makes the exchange of it."""
    loss, slope = jax.value_and_grad(loss_of)(weights, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slope)
    return jax.tree.map(lambda w, m: w - 0.05 * m, weights, momentum), momentum, loss


def save(step: int, weights: State, momentum: State) -> None:
    """The first process writes, which is what `checkpoint.writers: rank0` says."""
    if CHECKPOINTS is None or jax.process_index() or (final := Path(CHECKPOINTS, f"step-{step}")).exists():
        return
    # (1) Write into a folder beside the final one, then rename it: a folder with that name is whole.
    aside = final.with_name(f".tmp-step-{step}")
    aside.mkdir(parents=True, exist_ok=True)
    moments = {f"momentum.{name}": value for name, value in momentum.items()}
    np.savez(
        aside / "state.npz", step=step, **{name: np.asarray(each) for name, each in {**weights, **moments}.items()}
    )
    aside.rename(final)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    every = int(os.environ.get("MGPU_CHECKPOINT_EVERY_STEPS", "100"))  # checkpoint.every_steps of the run file
    parser.add_argument("--save-every", type=int, default=every)
    options = parser.parse_args()

    if "JAX_NUM_PROCESSES" in os.environ:  # `launcher: jax` sets these, and JAX_COORDINATOR_ADDRESS, which JAX reads
        numbers = (int(os.environ[name]) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        jax.distributed.initialize(None, *numbers)
    process, processes = jax.process_index(), jax.process_count()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    shared, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    chance = np.random.default_rng(0)
    shapes = {"up": (2, 64), "bias": (64,), "down": (64, 1)}
    values = {name: chance.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    values |= {f"momentum.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}

    # (2) Go on from the checkpoint that mgpu gives, if it gives one.
    first = 0
    if RESUME is not None:
        with np.load(Path(RESUME, "state.npz")) as state:
            values, first = {name: state[name] for name in values}, int(state["step"])
        if process == 0:
            print(f"goes on from step {first}", flush=True)
    weights, momentum = (
        {name: jax.device_put(values[at + name], whole) for name in shapes} for at in ("", "momentum.")
    )

    # (3) SIGTERM means: the machine is about to go, or somebody has said stop. Save after this step, then leave.
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

    for step in range(first + 1, options.steps + 1):
        x, y = (jax.make_array_from_process_local_data(shared, each) for each in batch(step, process, processes))
        weights, momentum, loss = train(weights, momentum, x, y)
        stop = bool(multihost_utils.process_allgather(np.array(bool(asked))).any())  # all leave at the same step
        if stop or step % options.save_every == 0 or step == options.steps:
            save(step, weights, momentum)
            if process == 0:
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if stop:
            break


if __name__ == "__main__":
    main()
