"""The layers of Kimi K3: Flax NNX modules, thin over pure functions of arrays."""
