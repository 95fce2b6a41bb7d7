"""Reads a Hugging Face directory (config.json + safetensors, official names) into the model.

Names come from each parameter's `ParamSpec.hf_name`; this file knows how the official tensors are
laid out: linear weights `[out, in]`, convolutions `[C, 1, W]`, pseudo-queries `[1, d]`, one tensor
per expert, and an `A_log` that may be padded past the live heads.
"""

from __future__ import annotations

import json
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
from k3jax.stacking import segments

_PREFIX = "language_model."
_OTHER_PARTS = ("vision_tower.", "mm_projector.")  # not part of the text backbone


class Tensors:
    """The tensors of a directory's `*.safetensors` files, read one at a time.

    Where there is an index, its files count and no others. `unread` are the names not read yet;
    tensors without elements (official code saves such ones) hold nothing to read.
    """

    def __init__(self, directory: Path):
        self.unread: set[str] = set()
        self._files: dict[str, tuple[safe_open, str]] = {}
        for path in _files(directory):
            try:
                file = safe_open(path, framework="flax")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name.startswith(_OTHER_PARTS) or 0 in file.get_slice(name).get_shape():
                    continue
                short = name.removeprefix(_PREFIX)
                if short in self._files:
                    raise ValueError(f"{path}: {name} is in another file of {directory} too")
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


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{directory}: holds no .safetensors file")
        return paths
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not a readable index ({error})") from error
    return [directory / name for name in sorted(names)]


def load(directory: str | Path, dtype: DType = "float32") -> Decoder:
    """The decoder of the checkpoint in `directory`, computing in `dtype`.

    Parameters are float32, or float64 where that is the dtype. Raises `ValueError` for float64
    without `jax_enable_x64`, and, naming the tensor, where one is missing, has another shape, or is
    left over.
    """
    if dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("dtype = 'float64': needs jax_enable_x64, which is off")
    config = model_config(directory, dtype)
    tensors = Tensors(Path(directory))
    if config.tie_embeddings:  # a copy of the embedding, where it is there at all
        tensors.unread.discard("lm_head.weight")
    model = Decoder(config, rngs=None)
    graphdef, state = nnx.split(model)
    flat = [
        (path, variable.replace(_value(path, variable, config, tensors)))
        for path, variable in nnx.to_flat_state(state)
    ]
    if tensors.unread:
        example = sorted(tensors.unread)[0]
        raise ValueError(
            f"{directory}: {len(tensors.unread)} tensors have no place in the model, e.g. {example}"
        )
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _value(path: tuple, variable: nnx.Variable, config: ModelConfig, tensors: Tensors) -> jax.Array:
    """The value of one variable of the decoder, layers stacked."""
    spec = spec_of_variable(variable)
    wide = jnp.issubdtype(spec.dtype, jnp.floating) and config.dtype == "float64"
    dtype = jnp.dtype("float64") if wide else spec.dtype
    if spec.hf_name is None:  # state that no checkpoint has, like the histogram's bounds
        return spec.init(jax.random.key(0), spec.shape, dtype)
    if path[0] != "blocks":
        return jnp.asarray(_tensor(tensors, spec.hf_name, spec), dtype)
    segment, place = segments(config)[path[1]], path[3]
    single = ParamSpec(spec.shape[1:], spec.axes[1:], spec.init, hf_name=spec.hf_name)
    layers = [
        _tensor(tensors, f"model.layers.{segment.layer(repeat, place)}.{spec.hf_name}", single)
        for repeat in range(segment.repeats)
    ]
    return jnp.asarray(np.stack(layers), dtype)


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
