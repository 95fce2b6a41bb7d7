"""Parameters, FLOPs and traffic of a configuration: arithmetic, no arrays."""

from k3jax.cost.experts import exchange_bytes, exchange_share, expert_flops
from k3jax.cost.flops import flops_per_token
from k3jax.cost.parameters import ParameterCounts, parameter_counts

__all__ = [
    "ParameterCounts",
    "exchange_bytes",
    "exchange_share",
    "expert_flops",
    "flops_per_token",
    "parameter_counts",
]
