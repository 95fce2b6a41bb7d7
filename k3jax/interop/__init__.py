"""Between this project and other people's checkpoints."""

from k3jax.interop.hf_config import model_config
from k3jax.interop.hugging_face import load

__all__ = ["load", "model_config"]
