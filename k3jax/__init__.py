"""k3jax: the Kimi K3 architecture for research, in JAX and Flax."""
