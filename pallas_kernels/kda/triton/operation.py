"""The kernels as two operations on rows, forward and backward, that vmap folds into more rows.

Arrays absent from a call are an array of no use in their place, since a kernel has all its
parameters always.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ..layout import CHUNK
from ..spec import Spec
from . import chunks, configs, gradients, launch, prepare, scan


class Rows(NamedTuple):
    """What both operations read. The first axis of every array is that of rows, except that
    parameters may have one row for all.

    q, k, v, gate as `kda` has them; beta `[B, T, HV]` activated, float32; parameters
    `[P, HV, 2, K]` float32, exp(a_log) and dt_bias of the gate (P = 1 or B); initial
    `[B, N, HV, K, V]` float32; bounds, groups, marks of `Chunks`. Absent ones are None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array | None
    beta: jax.Array
    parameters: jax.Array | None
    initial: jax.Array | None
    bounds: jax.Array | None
    groups: jax.Array | None
    marks: jax.Array | None


class Saved(NamedTuple):
    """What the forward keeps for the backward: the state before every chunk, transposed,
    `[B, HV, NC, VP, KP]`, and the errors E `[B, HV, NC, VP, 64]`, in the dtype of products and in
    units scales `[B, HV, NC, VP / columns]`."""

    states: jax.Array
    errors: jax.Array
    scales: jax.Array


class Gradients(NamedTuple):
    """Those of `Rows`, but q's and k's per value head, `[B, T, HV, K]`, and the parameters' per
    row, `[B, HV, 2, K]`; those of absent arrays are None."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array | None
    beta: jax.Array
    parameters: jax.Array | None
    initial: jax.Array | None


def by_rows(operation: Callable[..., Any]) -> Callable[..., Callable[[tuple], Any]]:
    """`operation(spec, *static, *trees)` as `(spec, *static) -> (trees) -> result`, which vmap
    turns into a call on more rows."""

    @functools.cache
    def of(spec: Spec, *static: Any) -> Callable[[tuple], Any]:
        @custom_vmap
        def call(trees):
            return operation(spec, *static, *trees)

        @call.def_vmap
        def fold(size, batched, trees):
            def rows(x, is_batched):
                if not is_batched:
                    if x.shape[0] == 1 != spec.batch:
                        return x  # parameters that all rows share
                    x = jnp.broadcast_to(x, (size, *x.shape))
                x = jnp.broadcast_to(x, (size, spec.batch, *x.shape[2:]))
                return x.reshape(size * spec.batch, *x.shape[2:])

            wide = dataclasses.replace(spec, batch=size * spec.batch)
            out = of(wide, *static)(jax.tree.map(rows, trees, batched[0]))
            out = jax.tree.map(lambda y: y.reshape(size, spec.batch, *y.shape[1:]), out)
            return out, jax.tree.map(lambda _: True, out)

        return call

    return of


@by_rows
def forward(
    spec: Spec, config: configs.Config, save: bool, rows: Rows
) -> tuple[jax.Array, jax.Array | None, Saved | None]:
    """o `[B, T, HV, V]`, the final states where asked, and what the backward needs where `save`."""
    call = _Call(spec, config, rows)
    minus_w, qd, kr, p_t, decay, e0, _, _, units = call.prepare(rows.v, backward=False)
    c = config
    kept = (call.chunks(c.VP, c.KP), call.chunks(c.VP, CHUNK), call.units)
    state = jax.ShapeDtypeStruct(spec.state_shape, jnp.float32)
    o, final, *saved = call.run(
        scan.scan,
        c.scan,
        (minus_w, qd, kr, p_t, decay, e0, units, rows.initial, rows.bounds, rows.groups),
        (spec.max_documents,),
        (
            call.o,
            state if spec.return_final_state else _NONE,
            *(kept if save else (_NONE, _NONE, _NONE)),
        ),
        call.scans,
        SAVE=save,
        **call.of_states,
    )
    return (
        o,
        final if spec.return_final_state else None,
        Saved(*saved) if save else None,
    )


@by_rows
def backward(
    spec: Spec,
    config: configs.Config,
    rows: Rows,
    o: jax.Array,
    saved: Saved,
    do: jax.Array,
    dfinal: jax.Array | None,
) -> Gradients:
    """The gradients of `rows` from those of o and of the final states."""
    call = _Call(spec, config, rows)
    c = config
    minus_w, qd, kr, p_t, decay, _, inverse, norms, units = call.prepare(do, backward=True)
    state = jax.ShapeDtypeStruct(spec.state_shape, jnp.float32)
    dinitial, dstates, dvalues, dscales = call.run(
        scan.reverse_scan,
        c.scan,
        (minus_w, qd, kr, p_t, decay, do, units, dfinal, rows.bounds, rows.groups, rows.marks),
        (spec.max_documents,),
        (
            state if spec.has_initial_state else _NONE,
            call.chunks(c.VP, c.KP),
            call.chunks(c.VP, CHUNK),
            call.units,
        ),
        call.scans,
        PACKED=call.packed,
        **call.of_states,
    )
    dv, dbeta, dpairs, pair_units, products, sides = call.run(
        gradients.value_gradients,
        c.values,
        (
            *(rows.v, do, o, rows.beta, inverse, saved.errors, saved.scales, dvalues, dscales),
            *(rows.bounds, rows.marks),
        ),
        (),
        (
            call.tokens(spec.value_width, c.gradient),
            jax.ShapeDtypeStruct(rows.beta.shape, jnp.float32),
            call.chunks(CHUNK, CHUNK),
            call.chunks(1, dtype="float32"),
            call.chunks(3, CHUNK, dtype="float32"),
            call.chunks(2, CHUNK, c.VP),
        ),
        call.programs,
        V=spec.value_width,
        VP=c.VP,
        BV=c.BV_values,
        COLUMNS=c.columns,
        SCALE=spec.scale,
        SCALED=c.scaled,
        PACKED=call.packed,
        MOVED=call.moved,
    )
    # Value heads that share a query head have their gradients summed by the caller.
    shared = spec.value_heads != spec.heads
    parametric = rows.parameters is not None
    partial = _array((spec.batch, call.NC, spec.value_heads, spec.key_width), "float32")
    dgates = {0: _NONE, 1: call.tokens(call.slabs, "float32")}
    dq, dk, dgate, da, dbias = call.run(
        gradients.key_gradients,
        c.keys,
        (
            *(rows.q, rows.k, rows.gate, rows.beta, rows.parameters, decay, sides, saved.errors),
            *(saved.states, saved.scales, dstates, dscales, dpairs, pair_units, products, norms),
            *(masks(), jnp.swapaxes(masks(), 1, 2).astype(c.gradient), rows.bounds, rows.marks),
        ),
        (),
        (
            call.tokens(spec.key_width, "float32" if shared else spec.q_dtype),
            call.tokens(spec.key_width, "float32" if shared else spec.k_dtype),
            dgates.get(spec.gate_width) or call.tokens(spec.key_width, spec.gate_dtype),
            partial if parametric else _NONE,
            partial if parametric else _NONE,
        ),
        call.programs * call.slabs,
        BK=c.BK,
        BV=c.BV_keys,
        **call.of_keys,
    )
    dparameters = None
    if parametric:
        dparameters = jnp.stack([da.sum(axis=1), dbias.sum(axis=1)], axis=2)
    if spec.gate_width == 1:
        dgate = jnp.sum(dgate, axis=-1, keepdims=True)
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        gate=dgate if spec.gate_width else None,
        beta=dbeta,
        parameters=dparameters,
        initial=dinitial if spec.has_initial_state else None,
    )


class _Call:
    """The sizes, constants and workspaces of a call on rows."""

    def __init__(self, spec: Spec, config: configs.Config, rows: Rows):
        self.spec, self.config, self.rows = spec, config, rows
        self.packed, self.moved = rows.marks is not None, rows.bounds is not None
        self.NC = chunks.count(spec.tokens, spec.max_documents, self.moved)
        groups = 1 if rows.groups is None else rows.groups.shape[1] - 1
        # Programs: of chunks, of slabs of a chunk, and of scans.
        self.programs = spec.batch * self.NC * spec.value_heads
        self.slabs = self.config.KP // self.config.BK
        self.tiles = self.config.VP // self.config.columns
        self.scans = spec.batch * groups * spec.value_heads * self.tiles
        self.of_states = {
            "K": spec.key_width,
            "V": spec.value_width,
            "KP": self.config.KP,
            "VP": self.config.VP,
            "BV": self.config.columns,
            "G": groups,
            "MOVED": self.moved,
            "HAS_INITIAL": spec.has_initial_state,
            "HAS_FINAL": spec.return_final_state,
            "SCALE": spec.scale,
            "SCALED": config.scaled,
            "STAGES": self.config.scan.stages,
        }
        self.of_keys = {
            "H": spec.heads,
            "K": spec.key_width,
            "V": spec.value_width,
            "KP": self.config.KP,
            "VP": self.config.VP,
            "COLUMNS": self.config.columns,
            "GW": spec.gate_width,
            "FORM": spec.gate_form if spec.gate_width else "log_decay",
            "LOWER": spec.lower_bound,
            "PER_ROW": rows.parameters is not None and rows.parameters.shape[0] == spec.batch,
            "L2NORM": spec.qk_l2norm,
            "PACKED": self.packed,
            "MOVED": self.moved,
        }

    def tokens(self, width: int, dtype: str) -> jax.ShapeDtypeStruct:
        """`[B, T, HV, width]`."""
        return _array((self.spec.batch, self.spec.tokens, self.spec.value_heads, width), dtype)

    def chunks(self, *shape: int, dtype: str = "") -> jax.ShapeDtypeStruct:
        """`[B, HV, NC, ...]`, in the dtype of products unless another is named."""
        lead = (self.spec.batch, self.spec.value_heads, self.NC)
        return _array((*lead, *shape), dtype or self.config.dtype)

    @property
    def units(self) -> jax.ShapeDtypeStruct:
        """Per chunk and tile of columns."""
        return self.chunks(self.tiles, dtype="float32")

    @property
    def o(self) -> jax.ShapeDtypeStruct:
        half = configs.in_half(self.spec)
        return self.tokens(self.spec.value_width, self.spec.v_dtype if half else "float32")

    def prepare(self, values: jax.Array, backward: bool) -> tuple[jax.Array, ...]:
        """-W, Qd, Kr, P, decay; E0 (forward); the inverse and norms (backward); units of values."""
        c, r = self.config, self.rows
        tall, square = self.chunks(CHUNK, c.KP), self.chunks(CHUNK, CHUNK)
        norms = self.chunks(2, CHUNK, dtype="float32")
        decay, e0 = self.chunks(c.KP, dtype="float32"), self.chunks(c.VP, CHUNK)
        last = (_NONE, square, norms) if backward else (e0, _NONE, _NONE)
        return self.run(
            prepare.prepare,
            c.prepare,
            (r.q, r.k, values, r.gate, r.beta, r.parameters, masks(), r.bounds, r.marks),
            (),
            (tall, tall, tall, square, decay, *last, self.units),
            self.programs,
            SCALE=self.spec.scale,
            SCALED=c.scaled,
            BACKWARD=backward,
            BK=c.BK_prepare,
            PAIR=configs.triton_dtype(c.pair),
            SOLVE=configs.triton_dtype(c.solve),
            **self.of_keys,
        )

    def run(
        self,
        kernel: Any,
        tuning: configs.Tuning,
        arrays: Sequence[jax.Array | None],
        sizes: Sequence[int],
        results: Sequence[jax.ShapeDtypeStruct],
        programs: int,
        **constants: Any,
    ) -> tuple[jax.Array, ...]:
        # An absent array is never read; any will do in its place.
        some = self.rows.beta
        return launch.call(
            kernel,
            [some if x is None else x for x in arrays],
            (self.spec.tokens, self.NC, *sizes),
            results,
            programs,
            warps=tuning.warps,
            stages=tuning.stages,
            HV=self.spec.value_heads,
            PRECISION=self.config.precision,
            **constants,
        )


def masks() -> jax.Array:
    """`[8, 64, 64]` of 0 and 1 in float16: which tokens j have their log decay in a sum of token i.
    One for every level of pairs (`tiles.py`): in an odd block of 2^l tokens those from its start to
    i, in an even one those from after i to its end; then those up to i, and those after i."""
    i, j = np.indices((CHUNK, CHUNK))
    upto = j <= i
    levels = [((i ^ j) >> n == 0) & ((i >> n & 1) == upto) for n in range(CHUNK.bit_length() - 1)]
    return jnp.asarray(np.stack([*levels, upto, ~upto]), jnp.float16)


_NONE = jax.ShapeDtypeStruct((1,), jnp.float32)


def _array(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
