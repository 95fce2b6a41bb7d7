"""AdamW and Muon, chosen parameter by parameter.

A parameter's `ParamSpec` says which rule it follows when Muon is on and whether weight decay
applies. Both groups share one learning rate, as Muon's direction is scaled to AdamW's root mean
square. Muon (Moonlight, arXiv 2502.16982; K3R §2.5): `M <- mu M + G`, the direction is that of
`mu M + G`.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

from k3jax.config import OptimiserConfig, OptimiserRule
from k3jax.optim.muon import directions
from k3jax.optim.schedules import learning_rate
from k3jax.params import ParamSpec, map_specs, spec_of_variable


def make_optimiser(
    config: OptimiserConfig, steps: int, params: nnx.State, peak: jax.Array | None = None
) -> optax.GradientTransformation:
    """The optimiser of `params` (concrete or abstract) for a run of `steps` updates.

    `peak` takes the place of `config.learning_rate` and may be traced.

    Clip by global norm, then the direction of each parameter's rule, then decoupled weight decay,
    then the schedule's rate. Under Muon the last two axes of a parameter are matrices `[in, out]`,
    one for each head with `muon_per_head`; leading axes (layers, experts) count matrices.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()

    def orthogonal(momentum: nnx.State, _: Any) -> nnx.State:
        leaves, tree = jax.tree.flatten(momentum, is_leaf=_is_parameter)
        values = directions(
            [v[...] for v in leaves], [spec_of_variable(v) for v in leaves], config.muon_per_head
        )
        new = [v.replace(value) for v, value in zip(leaves, values, strict=True)]
        return jax.tree.unflatten(tree, new)

    rules = {
        "adamw": optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        "muon": optax.chain(
            optax.trace(config.muon_momentum, nesterov=True), optax.stateless(orthogonal)
        ),
    }
    return optax.chain(
        clip,
        optax.partition(rules, map_specs(lambda spec: rule_of(spec, config), params)),
        optax.add_decayed_weights(config.weight_decay, map_specs(lambda spec: spec.decay, params)),
        optax.scale_by_learning_rate(learning_rate(config, steps, peak)),
    )


def rule_of(spec: ParamSpec, config: OptimiserConfig) -> OptimiserRule:
    """The rule that a parameter of `spec` follows."""
    return spec.rule if config.kind == "muon" else "adamw"


def update(
    optimiser: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """One step: `(new params, new optimiser state)`, laid out over the mesh as the old ones."""
    updates, new_state = optimiser.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), new_state


def _is_parameter(node: Any) -> bool:
    """Whether `node` is a variable with a value: optax masks those that follow another rule."""
    return isinstance(node, nnx.Variable) and bool(jax.tree.leaves(node))
