"""Parameters and FLOPs of a configuration: arithmetic, no arrays."""

from k3jax.cost.flops import flops_per_token
from k3jax.cost.parameters import ParameterCounts, parameter_counts

__all__ = ["ParameterCounts", "flops_per_token", "parameter_counts"]
