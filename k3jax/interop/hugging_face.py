"""Reads a Hugging Face directory (config.json + safetensors, official names) into the model.

Names come from each parameter's `ParamSpec.hf_name`; this file knows how the official tensors are
laid out: linear weights `[out, in]`, convolutions `[C, 1, W]`, pseudo-queries `[1, d]`, one tensor
per expert, and an `A_log` that may be padded past the live heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from k3jax.config import DType, ModelConfig
from k3jax.interop.hf_config import model_config
from k3jax.model import Decoder
from k3jax.params import ParamSpec, spec_of_variable
from k3jax.stacking import Segment, segments

_PREFIX = "language_model."
_OTHER_PARTS = ("vision_tower.", "mm_projector.")  # not part of the text backbone


class Tensors:
    """The tensors of all `*.safetensors` files of a directory, read one at a time."""

    def __init__(self, directory: Path):
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{directory}: holds no .safetensors file")
        self.unread: set[str] = set()
        self._files = {}
        for path in paths:
            try:
                file = safe_open(path, framework="flax")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if not name.startswith(_OTHER_PARTS):
                    short = name.removeprefix(_PREFIX)
                    self._files[short] = (file, name)
                    self.unread.add(short)

    def read(self, name: str) -> np.ndarray:
        """The tensor of that name without its `language_model.` prefix."""
        if name not in self._files:
            packed = name.replace(".weight", ".weight_packed")
            hint = "; MXFP4 weights are not supported" if packed in self._files else ""
            raise ValueError(f"{name}: no such tensor in the checkpoint{hint}")
        file, full_name = self._files[name]
        self.unread.discard(name)
        return np.asarray(file.get_tensor(full_name))


def load(directory: str | Path, dtype: DType = "float32") -> Decoder:
    """The decoder of the checkpoint in `directory`, computing in `dtype`.

    Parameters are float32, or float64 where that is the dtype (needs `jax_enable_x64`). Raises
    `ValueError`, naming the tensor, where one is missing, has another shape, or is left over.
    """
    config = model_config(directory, dtype)
    tensors = Tensors(Path(directory))
    model = Decoder(config, rngs=None)
    graphdef, state = nnx.split(model)
    kept = jnp.promote_types(jnp.dtype(dtype), jnp.float32)
    flat = [
        (path, variable.replace(jnp.asarray(_value(path, variable, config, tensors), kept)))
        for path, variable in nnx.to_flat_state(state)
    ]
    if tensors.unread:
        example = sorted(tensors.unread)[0]
        raise ValueError(
            f"{directory}: {len(tensors.unread)} tensors have no place in the model, e.g. {example}"
        )
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _value(
    path: tuple, variable: nnx.Variable, config: ModelConfig, tensors: Tensors
) -> np.ndarray | jax.Array:
    """The value of one variable of the decoder, layers stacked."""
    spec = spec_of_variable(variable)
    if spec.hf_name is None:  # state that no checkpoint has, like the histogram's bounds
        return spec.init(jax.random.key(0), spec.shape, spec.dtype)
    if path[0] != "blocks":
        return _tensor(tensors, spec.hf_name, spec)
    segment, place = segments(config)[path[1]], path[3]
    single = ParamSpec(spec.shape[1:], spec.axes[1:], spec.init, hf_name=spec.hf_name)
    return np.stack(
        [
            _tensor(tensors, f"model.layers.{layer}.{spec.hf_name}", single)
            for layer in _layers(segment, place)
        ]
    )


def _layers(segment: Segment, place: int) -> Iterator[int]:
    return (segment.layer(repeat, place) for repeat in range(segment.repeats))


def _tensor(tensors: Tensors, name: str, spec: ParamSpec) -> np.ndarray:
    """The official tensor `name`, or one per expert, in this project's layout."""
    if "{expert}" in name:
        each = ParamSpec(spec.shape[1:], spec.axes[1:], spec.init)
        experts = range(spec.shape[0])
        return np.stack([_tensor(tensors, name.format(expert=e), each) for e in experts])
    stored = tensors.read(name)
    value = stored
    if name.endswith("conv1d.weight"):
        value = value.reshape(value.shape[0], -1).T
    elif name.endswith("A_log"):
        value = value.reshape(-1)[: spec.shape[0]]  # only the first heads are real
    elif name.endswith(("dt_bias", "_res_proj.weight")) and value.size == np.prod(spec.shape):
        value = value.reshape(spec.shape)
    elif value.ndim == 2 and "embed_tokens" not in name:
        value = value.T
    if value.shape != spec.shape:
        raise ValueError(f"{name}: shape {list(stored.shape)} does not give {list(spec.shape)}")
    return value
