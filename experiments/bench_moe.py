"""What a mixture of experts costs over several devices, transport by transport.

    python -m experiments.bench_moe --config=k3_1b --mesh=expert=4 --tokens=16384
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python -m \
        experiments.bench_moe --config=nano --mesh=data=2,expert=4 --tokens=256 --repeats=3

One layer of the configuration runs forward and backward, `--tokens` per device, by every transport
that the platform has, and once on a single device with all the tokens and all the experts, which
the others must equal. A line of the table has

  step      time of the layer and its gradients
  exchange  time of its rows' way to the experts and back, forward and backward, without experts:
            what sorting, gathering and sending cost
  share     exchange / step
  sent      what the formula of `k3jax.cost` says a device sends, and that per second of exchange
  dropped   routes that found no room (`--set model.moe.buffer_factor=0` has room for all)
  error     relative RMS of outputs and gradients against the single device, the larger

Times are medians of `--repeats` runs. Bad input ends in one line and exit code 2.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jax.sharding import NamedSharding

from configs import CONFIGS
from experiments.options import json_file, measurements, repeats, write_json
from experiments.program import launch
from k3jax.config import MeshConfig, ModelConfig
from k3jax.cost import exchange_bytes
from k3jax.flags import define, override, resolve
from k3jax.layers.latent_moe import LatentMoE
from k3jax.parallel.experts import TRANSPORTS, Group
from k3jax.params import spec_of_variable
from k3jax.sharding import BATCH, Rules, activation_spec, make_mesh
from pallas_kernels.dispatch import current_platform

MESH = flags.DEFINE_list("mesh", ["expert=1"], "Devices along mesh axes: data=2,expert=4.")
TOKENS = flags.DEFINE_integer("tokens", 16_384, "Of each device.", lower_bound=1)
repeats()
SEED = flags.DEFINE_integer("seed", 0, "Of parameters and tokens.")
TRANSPORT = flags.DEFINE_list("transport", [], "Of ring, padded, ragged; by default all there are.")
json_file()


def measure(config: ModelConfig, mesh: MeshConfig, transport: str, repeats: int) -> dict[str, Any]:
    """Time and results of one layer on `mesh`, whose tokens are split over its devices."""
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, transport=transport))
    graphdef, shapes = nnx.split(LatentMoE(config, rngs=None))
    params, rest = (_drawn(part) for part in nnx.split_state(shapes, nnx.Param, ...))
    rows, length = _shape()
    x, ct = (_normal(name, (rows, length, config.d_model), config.dtype) for name in ("x", "ct"))

    @jax.jit
    def step(params, rest, x, ct):
        real = jnp.ones_like(x[..., 0], bool)

        def run(params, x):
            layer = nnx.merge(graphdef, params, rest)
            y, _, stats = layer(x, documents=SimpleNamespace(real=real))
            return y, stats["dropped_routes"].value

        y, pull, dropped = jax.vjp(run, params, x, has_aux=True)
        return y, pull(ct), dropped

    seconds, (y, grads, dropped) = _timed(lambda: step(params, rest, x, ct), repeats)
    results = jax.tree.map(lambda a: np.asarray(a, np.float32), (y, grads))
    return {"step": seconds, "dropped": int(dropped), "results": results}


def exchange(config: ModelConfig, mesh: MeshConfig, transport: str, repeats: int) -> float:
    """Seconds that rows take there and back, twice, without any experts."""
    moe, k = config.moe, config.moe.top_k
    group = Group("expert", mesh.expert, moe.experts, moe.buffer_factor)
    module, tokens = TRANSPORTS[transport], TOKENS.value
    rows, length = _shape()
    z = _normal("z", (rows, length, moe.latent_width or config.d_model), config.dtype)
    scores = _normal("scores", (rows, length, moe.experts), "float32")
    spec = activation_spec(3)

    def shard(z, scores):
        z = z.reshape(tokens, -1)
        weights, indices = jax.lax.top_k(scores.reshape(tokens, -1), k)
        plan = module.make_plan(indices, jnp.ones(tokens, bool), group)
        for _ in range(2):
            scale = module.spread(weights.reshape(-1), plan, group, 1)
            y = module.collect(module.spread(z, plan, group, k), plan, group, k)
            weights = module.collect(scale, plan, group, 1).reshape(weights.shape)
            z = y.astype(z.dtype)
        return (z + weights.sum(1, keepdims=True).astype(z.dtype)).reshape(1, tokens, -1)

    whole = jax.shard_map(shard, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    # Choosing experts is the router's work: it is timed alone, and taken off.
    choose = jax.jit(lambda scores: jax.lax.top_k(scores, k))
    both, _ = _timed(functools.partial(jax.jit(whole), z, scores), repeats)
    return max(both - _timed(functools.partial(choose, scores), repeats)[0], 0.0)


def _shape() -> tuple[int, int]:
    """Rows and their length, so that every device of the mesh has `--tokens`.

    A single device has the tokens of all.
    """
    shape = _mesh()
    return int(np.prod([getattr(shape, axis) for axis in BATCH])), TOKENS.value * shape.context


@functools.cache
def _mesh() -> MeshConfig:
    return override(MeshConfig(), MESH.value)


def _normal(
    name: str, shape: tuple[int, ...], dtype: str, std: float = 1.0, spec: Any = None
) -> jax.Array:
    """Random values, by `name` alone whatever the mesh; laid out as tokens by default."""
    key = jax.random.fold_in(jax.random.key(SEED.value), zlib.crc32(name.encode()))
    spec = activation_spec(len(shape)) if spec is None else spec
    draw = lambda key: (std * jax.random.normal(key, shape)).astype(dtype)  # noqa: E731
    return jax.jit(draw, out_shardings=NamedSharding(jax.sharding.get_mesh(), spec))(key)


def _drawn(state: nnx.State) -> nnx.State:
    """Matrices of the usual scale, gains of one, and no bias of the router."""
    drawn = []
    for path, variable in nnx.to_flat_state(state):
        spec = spec_of_variable(variable)
        layout = Rules().spec(spec.axes)
        if isinstance(variable, nnx.Param) and len(spec.shape) > 1:
            value = _normal("/".join(map(str, path)), spec.shape, spec.dtype, 0.02, layout)
        else:
            value = spec.init(jax.random.key(0), spec.shape, spec.dtype)
            value = jax.device_put(value, NamedSharding(jax.sharding.get_mesh(), layout))
        drawn.append((path, variable.replace(value)))
    return nnx.from_flat_state(drawn)


def _timed(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds, and the result."""
    out = jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times), out


def _error(got: Any, want: Any) -> float:
    """The largest relative RMS difference of any result."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    norm = np.linalg.norm
    return max(float(norm(g - w) / (norm(w) or 1.0)) for g, w in pairs)


def run() -> int:
    model, mesh, times = resolve(CONFIGS).model, _mesh(), measurements()
    if not model.moe.experts:
        raise ValueError("model.moe.experts = 0: there is nothing to measure")
    devices = make_mesh(mesh)
    able = ["ring", "padded"] if current_platform() == "cpu" else ["ring", "padded", "ragged"]
    names = TRANSPORT.value or able
    if unknown := set(names) - set(able):
        raise ValueError(f"--transport = {','.join(sorted(unknown))}: must be of {', '.join(able)}")

    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        alone = measure(model, MeshConfig(), "local", times)
    print(f"{jax.devices()[0].device_kind} x {devices.size}, {TOKENS.value} tokens each")
    print(f"one device, all tokens: step {alone['step'] * 1e3:.2f} ms")
    found: dict[str, dict[str, Any]] = {"single": {"step": alone["step"]}}
    width = model.moe.latent_width or model.d_model
    print("transport  step ms  exchange ms  share  sent MB    GB/s  dropped    error")
    for name in names:
        with jax.set_mesh(devices):
            row = measure(model, mesh, name, times)
            row["exchange"] = exchange(model, mesh, name, times)
        row["error"] = _error(row.pop("results"), alone["results"])
        size = jnp.dtype(model.dtype).itemsize
        counts = (model.moe, width, TOKENS.value, mesh.expert, name)
        row["sent"] = 2 * exchange_bytes(*counts, element_bytes=size)
        found[name] = row
        print(
            f"{name:9}  {row['step'] * 1e3:7.2f}  {row['exchange'] * 1e3:11.2f}  "
            f"{row['exchange'] / row['step']:5.0%}  {row['sent'] / 1e6:7.1f}  "
            f"{row['sent'] / 1e9 / max(row['exchange'], 1e-9):6.1f}  {row['dropped']:7}  "
            f"{row['error']:.1e}"
        )
    write_json(found)
    return 0


if __name__ == "__main__":
    define(CONFIGS)
    launch(run)
