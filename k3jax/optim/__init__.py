"""Optimisers: optax, with each parameter's rule and weight decay taken from its `ParamSpec`."""

from k3jax.optim.optimiser import make_optimiser, rule_of, update
from k3jax.optim.qk_clip import clip_logits
from k3jax.optim.schedules import learning_rate

__all__ = ["clip_logits", "learning_rate", "make_optimiser", "rule_of", "update"]
