"""Packed rows as regions of chunks: no token is moved, tables say where chunks start.

A region is what the scan walks over with one state: with states asked, region n of a row is what
document n + 1 owns (padding belongs to the document before it, leading padding to the first), and
one more region takes documents that own no slot; without, the whole row is one region. Chunks
start at their region's first token, so they straddle no region; where documents share a region,
labels tell a chunk's tokens apart.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import documents
from .chunks import Chunks
from .tiles import CHUNK


class Tables(NamedTuple):
    """chunks `[B, 5, NC]`: first token, number of tokens (-1: no chunk), labels of the documents
    live before and after, whether it is whole (`chunks.Place`); spans `[B, 4, R]`: a region's first
    chunk, number of chunks, first token, number of tokens; sources `[B, NC 64]`: the token at each
    place of the chunks, and places `[B, T]`: the place of each token; labels `[B, NC 64]`, negative
    at padding; keeps `[B, NC 64]` int16, all bits set at a chunk's own, real tokens, and none at
    others; used `[B]`: how many chunks there are, the first ones."""

    chunks: jax.Array
    spans: jax.Array
    sources: jax.Array
    places: jax.Array
    labels: jax.Array
    keeps: jax.Array
    used: jax.Array


def chunk_count(tokens: int, regions: int) -> int:
    """Chunks that hold any split of a row into regions, each of at least one chunk."""
    return tokens // CHUNK + regions


def tabulate(segment_ids: jax.Array, regions: int, chunks: int) -> Tables:
    docs = documents.read(segment_ids)
    tokens = segment_ids.shape[1]
    label = jnp.maximum(docs.live, 1)
    region = jnp.minimum(label, regions) - 1
    bounds = documents.places(region, jnp.arange(regions + 1))
    sizes = jnp.diff(bounds)
    counts = jnp.maximum(-(-sizes // CHUNK), 1)
    ends = jnp.cumsum(counts, axis=1)
    begins = ends - counts

    index = jnp.arange(chunks)
    owner = documents.places(ends, index, side="right")
    used = owner < regions

    def pick(x):
        return jnp.take_along_axis(x, jnp.minimum(owner, regions - 1), axis=1)

    offset = (index - pick(begins)) * CHUNK
    first = pick(bounds[:, :-1]) + offset
    size = jnp.clip(pick(sizes) - offset, 0, CHUNK)

    def at(place):
        return jnp.take_along_axis(label, jnp.clip(place, 0, tokens - 1), axis=1)

    entry = at(jnp.where(offset > 0, first - 1, first))
    leave = jnp.where(size > 0, at(first + size - 1), entry)
    spans = [begins, counts, bounds[:, :-1], sizes]
    sources = (first[..., None] + jnp.arange(CHUNK)).reshape(*first.shape[:1], -1)
    sources = jnp.clip(sources, 0, tokens - 1)
    labels = jnp.take_along_axis(jnp.where(docs.real, label, -label), sources, axis=1)
    by_chunk = labels.reshape(*first.shape, CHUNK)
    real = (by_chunk > 0) & (jnp.arange(CHUNK) < size[..., None])
    keeps = -real.astype(jnp.int16).reshape(labels.shape)
    of_one = (by_chunk == entry[..., None]).all(axis=-1)
    whole = of_one & (size == CHUNK) & (entry == leave)
    table = [first, jnp.where(used, size, -1), entry, leave, whole & used]
    shift = begins * CHUNK - bounds[:, :-1]
    return Tables(
        jnp.stack(table, axis=1).astype(jnp.int32),
        jnp.stack(spans, axis=1).astype(jnp.int32),
        sources,
        jnp.arange(tokens) + jnp.take_along_axis(shift, region, axis=1),
        labels,
        keeps,
        ends[:, -1].astype(jnp.int32),
    )


def empty(c: Chunks) -> Tables:
    """Stand-ins where rows are not packed: nothing reads them."""
    none = jnp.zeros((c.batch, 5, 1), jnp.int32)
    few = none[:, :, 0]
    return Tables(none, none, few, few, few, few.astype(jnp.int16), few[:, 0])


def cut(c: Chunks, tables: Tables) -> Tables:
    """With the pieces of rows as their regions."""
    whole = -(-c.tokens // CHUNK)
    most = -(-whole // c.pieces)
    begin = jnp.arange(c.pieces) * most
    count = jnp.minimum(most, whole - begin)
    tokens = jnp.minimum(c.tokens - begin * CHUNK, count * CHUNK)
    spans = jnp.stack([begin, count, begin * CHUNK, tokens]).astype(jnp.int32)
    return tables._replace(spans=jnp.broadcast_to(spans, (c.batch, *spans.shape)))


def by_place(c: Chunks, tables: Tables, x: jax.Array) -> jax.Array:
    """`[B HV, T]` to `[B HV, NC 64]`."""
    if not c.packed:
        return jnp.pad(x, ((0, 0), (0, c.length - c.tokens)))
    sources = jnp.repeat(tables.sources, c.value_heads, axis=0)
    return jnp.take_along_axis(x, sources, axis=1)


def by_token(c: Chunks, tables: Tables, x: jax.Array) -> jax.Array:
    """Back from `by_place`."""
    if not c.packed:
        return x[:, : c.tokens]
    return jnp.take_along_axis(x, jnp.repeat(tables.places, c.value_heads, axis=0), axis=1)
