"""The decoder: embedding, stacked super-blocks under a scan, final mix, head.

Kimi K3 and Kimi Linear are two settings of it (K3R §2, KLR §3). The same module trains, prefills
and decodes; what differs is the cache that is passed in.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from k3jax.config import ModelConfig
from k3jax.layers.attn_res import AttentionResidual, Depth, depth_of
from k3jax.layers.block import PROBES, Stream, SuperBlock
from k3jax.layers.documents import Documents, one_document
from k3jax.layers.linear import gain, island, matmul, matrix, normal, rms_norm
from k3jax.layers.row_cache import check
from k3jax.layers.stats import Stats
from k3jax.parallel.local import local
from k3jax.params import ParamSpec, check_layout, declare, initialise, stack, weight
from k3jax.sharding import Rules, spec_of, under_mesh
from k3jax.stacking import segments, stored_sources

# Logits that exist at one time while the loss is computed: of this many tokens, or so many numbers.
_LOSS_TOKENS, _LOSS_LOGITS = 1024, 1 << 24
# Vocabularies that are looked up by a product: where many tokens share few rows, a scatter-add, the
# gradient of a gather, takes longer on a GPU than all else, and adds in the dtype of the table.
_ONE_HOT = 1024


class Decoder(nnx.Module):
    """A Kimi decoder after `config`; abstract (shapes only) where `rngs` is None.

    `model.blocks[s]` is the stack of segment s (`k3jax.stacking`): a super-block whose variables
    have a leading `layers` axis. Raises `ValueError` where the current mesh does not divide a
    parameter or the heads of a layer.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        self.config = config
        vocab, d_model = config.vocab_size, config.d_model
        spec = ParamSpec(
            (vocab, d_model), ("vocab", "embed"), normal(config.init_std),
            decay=True, hf_name="model.embed_tokens.weight",
        )  # fmt: skip
        self.embedding = declare(spec, None)
        self.blocks = nnx.List(
            [
                stack(SuperBlock(config, segment.pattern, rngs=None), segment.repeats)
                for segment in segments(config)
            ]
        )
        if config.residual.kind != "plain":
            self.residual = AttentionResidual(
                d_model, config.norm_eps, "model.output_attn_res", rngs=None
            )
        self.norm = declare(gain(d_model, "model.norm.weight"), None)
        if not config.tie_embeddings:
            axes, name = ("embed", "vocab"), "lm_head.weight"
            spec = matrix((d_model, vocab), axes, name, config.init_std, "adamw")
            self.head = declare(spec, None)
        if under_mesh():
            self._check_mesh()
        if rngs is not None:
            initialise(self, rngs)

    def _check_mesh(self) -> None:
        """Raises `ValueError` where the current mesh does not divide a parameter, or heads."""
        check_layout(nnx.state(self))
        axis = Rules().heads
        devices = 1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis]
        for index, blocks in enumerate(self.blocks):
            for place, layer in enumerate(blocks.layers):
                for name in ("heads", "kv_heads"):
                    heads = getattr(layer.mixer.config, name, 0)
                    if heads % devices:
                        raise ValueError(
                            f"mesh.{axis} = {devices}: does not divide the {heads} {name} of "
                            f"blocks/{index}/layers/{place}/mixer"
                        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        documents: Documents | None = None,
        cache: list[Any] | None = None,
        probes: Sequence[str] = (),
    ) -> tuple[jax.Array, list[Any] | None, Stats]:
        """`tokens [B, T]` int32 -> `(logits [B, T, vocab], cache, stats)`, logits at least float32.

        Without `documents` each row is one document. Padding rows and tokens get finite logits that
        mean nothing.
        """
        hidden, cache, stats = self.hidden(tokens, documents=documents, cache=cache, probes=probes)
        return _logits(hidden, self.head_matrix()), cache, stats

    def hidden(
        self,
        tokens: jax.Array,
        *,
        documents: Documents | None = None,
        cache: list[Any] | None = None,
        probes: Sequence[str] = (),
    ) -> tuple[jax.Array, list[Any] | None, Stats]:
        """As `__call__`, but the normed hidden states `[B, T, d]` before the head.

        Raises `ValueError` for an unknown probe (see `k3jax.layers.block.PROBES`), and, where
        values are concrete, for documents that do not fit the cache (`row_cache.check`).
        """
        unknown = set(probes) - set(PROBES)
        if unknown:
            raise ValueError(f"probes = {probes!r}: must be among {', '.join(PROBES)}")
        if documents is None:
            documents = one_document(tokens)
        check(documents, cache)
        x = self._embed(tokens)
        plain, slots = self.config.residual.kind == "plain", stored_sources(self.config)
        stream: Stream = x if plain else depth_of(x, slots)
        stats: Stats = {"blocks": {}}
        caches = []
        for index, blocks in enumerate(self.blocks):
            before = None if cache is None else cache[index]
            stream, after, found = self._scan(blocks, stream, documents, before, tuple(probes))
            caches.append(after)
            stats["blocks"][index] = found
        if "mix_weights" in probes and isinstance(stream, Depth):
            stats["residual"] = self.residual.measure(stream, documents.real)
        h = self.residual(stream) if isinstance(stream, Depth) else stream
        h = rms_norm(h, self.norm[...], self.config.norm_eps)
        return h, None if cache is None else caches, stats

    def empty_cache(self, batch: int, capacity: int) -> list[Any]:
        """The cache of `batch` rows that have not begun, for up to `capacity` tokens a row."""
        dtype = jnp.dtype(self.config.dtype)
        return [
            [
                jax.tree.map(
                    lambda a, r=segment.repeats: jnp.broadcast_to(a, (r, *a.shape)),
                    layer.mixer.empty_cache(batch, capacity, dtype),
                )
                for layer in blocks.layers
            ]
            for segment, blocks in zip(segments(self.config), self.blocks, strict=True)
        ]

    def head_matrix(self) -> jax.Array:
        """The output projection `[d, vocab]`, ready to compute with."""
        dtype = jnp.dtype(self.config.dtype)
        if self.config.tie_embeddings:
            return weight(self.embedding, dtype).T
        return weight(self.head, dtype)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        table = weight(self.embedding, jnp.dtype(self.config.dtype))
        if len(table) <= _ONE_HOT:
            return _by_product(table, tokens)
        if not under_mesh():
            return table[tokens]
        return table.at[tokens].get(out_sharding=PartitionSpec(*spec_of(tokens), None))

    def _scan(
        self,
        blocks: SuperBlock,
        stream: Stream,
        documents: Documents,
        cache: list[Any] | None,
        probes: tuple[str, ...],
    ) -> tuple[Stream, list[Any] | None, Stats]:
        graphdef, state = nnx.split(blocks)

        def body(stream, slices):
            state, cache = slices
            block = nnx.merge(graphdef, state)
            stream, cache, stats = block(stream, documents=documents, cache=cache, probes=probes)
            return stream, (cache, stats)

        stream, (cache, stats) = jax.lax.scan(
            body, stream, (state, cache), unroll=True if self.config.unroll else 1
        )
        return stream, cache, stats


@jax.checkpoint  # the backward pass saves the tokens, not the rows of zeros and ones
def _by_product(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `table [vocab, d]`, one for each of `tokens [B, T]`."""
    layout = PartitionSpec(None, None, spec_of(table)[0]) if under_mesh() else None
    places = jax.lax.broadcasted_iota(tokens.dtype, (1, 1, len(table)), 2, out_sharding=layout)
    return matmul((tokens[..., None] == places).astype(table.dtype), table)


def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """`hidden [..., d] @ head [d, vocab]`, accumulated and kept in the island's dtype."""
    wide = island(hidden.dtype)
    precision = None if hidden.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.matmul(hidden, head, precision=precision, preferred_element_type=wide)


def token_scores(
    model: Decoder, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the model makes of `targets [B, T]` given `hidden [B, T, d]`, `[B, T]` each.

    The negative log-likelihood in nats, and whether no other token is more probable (bool). At most
    `_LOSS_TOKENS` tokens or `_LOSS_LOGITS` logits, whichever is more, are in memory at one time, in
    the backward pass too.
    """
    head = model.head_matrix()
    axis = spec_of(head)[1] if under_mesh() else None
    scores = functools.partial(_blockwise_scores, axis=axis)
    return local(scores, hidden, head, targets, out_specs=(spec_of(targets),) * 2)


def _blockwise_scores(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """Of this device's tokens; where the vocabulary is split over `axis`, `head` is its part.

    Of the logits only sums and maxima per token leave a device.
    """
    count, width = targets.size, hidden.shape[-1]
    most = max(_LOSS_TOKENS, _LOSS_LOGITS // head.shape[1])
    blocks = max(-(-count // most), 1)
    size = -(-count // blocks)
    spare = blocks * size - count
    first = 0 if axis is None else jax.lax.axis_index(axis) * head.shape[1]

    @jax.checkpoint
    def score(block):
        rows, labels = block
        logits = _logits(rows, head)
        top = jax.lax.stop_gradient(logits.max(axis=1))
        top = top if axis is None else jax.lax.pmax(top, axis)
        place = labels - first
        inside = (place >= 0) & (place < head.shape[1])
        picked = jnp.take_along_axis(logits, place[:, None], axis=1, mode="clip")[:, 0]
        sums = jnp.exp(logits - top[:, None]).sum(axis=1), jnp.where(inside, picked, 0)
        total, picked = sums if axis is None else jax.lax.psum(sums, axis)
        return top + jnp.log(total) - picked, picked >= top

    rows = jnp.pad(hidden.reshape(count, width), ((0, spare), (0, 0)))
    rows = rows.reshape(blocks, size, width)
    labels = jnp.pad(targets.reshape(count), (0, spare)).reshape(blocks, size)
    scores = jax.lax.map(score, (rows, labels))
    return jax.tree.map(lambda x: x.reshape(-1)[:count].reshape(targets.shape), scores)


def next_token_loss(
    model: Decoder, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`(sum of weighted nll, sum of the weights of targets that are the most probable token)`.

    `weights [B, T]` are zero where a target is padding, masked, or another document's first token.
    """
    nll, correct = token_scores(model, hidden, targets)
    weights = weights.astype(nll.dtype)
    # A masked target may sit on a hidden state that means nothing: its loss must not leak as NaN.
    return jnp.sum(jnp.where(weights > 0, nll * weights, 0)), jnp.sum(correct * weights)
