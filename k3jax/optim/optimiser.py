"""AdamW and Muon, chosen parameter by parameter.

A parameter's `ParamSpec` says which rule it follows when Muon is on and whether weight decay
applies. Both groups share one learning rate: Muon's direction is scaled to AdamW's root mean square
(Moonlight, arXiv 2502.16982, eq. 4).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from flax import nnx

from k3jax.config import OptimiserConfig
from k3jax.optim.schedules import learning_rate
from k3jax.params import ParamSpec, map_specs
from k3jax.sharding import spec_of, under_mesh

MUON_RMS = 0.2  # root mean square of an update at rate 1, AdamW's typical one


def make_optimiser(
    config: OptimiserConfig, steps: int, params: nnx.State
) -> optax.GradientTransformation:
    """The optimiser of `params` (concrete or abstract) for a run of `steps` updates.

    Clip by global norm, then the direction of each parameter's rule, then decoupled weight decay,
    then the schedule's rate. Under Muon the last two axes of a parameter are a matrix `[in, out]`;
    leading axes (layers, experts) count matrices. Raises `ValueError` where a spec asks Muon for
    a vector.
    """

    def rule(spec: ParamSpec) -> str:
        if config.kind == "muon" and spec.rule == "muon":
            if len(spec.shape) < 2:
                raise ValueError(
                    f"rule = 'muon': shape {spec.shape} of {spec.hf_name} is no matrix"
                )
            return "muon"
        return "adamw"

    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    directions = {
        "adamw": optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        "muon": optax.chain(
            optax.contrib.scale_by_muon(
                beta=config.muon_momentum, weight_dimension_numbers=_last_two_axes
            ),
            optax.stateless(_match_adamw),
        ),
    }
    return optax.chain(
        clip,
        optax.partition(directions, map_specs(rule, params)),
        optax.add_decayed_weights(config.weight_decay, map_specs(lambda spec: spec.decay, params)),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )


def update(
    optimiser: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """One step: `(new params, new optimiser state)`, laid out over the mesh as the old ones.

    optax contracts and transposes as it likes, which Explicit axes refuse: the step runs where they
    are Auto.
    """

    def step(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        updates, new_state = optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_state

    if not under_mesh():
        return step(grads, opt_state, params)
    layout = jax.tree.map(spec_of, (params, opt_state))
    return jax.sharding.auto_axes(step, out_sharding=layout)(grads, opt_state, params)


def _last_two_axes(updates: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)


def _match_adamw(updates: Any, params: Any) -> Any:
    return jax.tree.map(lambda u: MUON_RMS * math.sqrt(max(u.shape[-2:])) * u, updates)
