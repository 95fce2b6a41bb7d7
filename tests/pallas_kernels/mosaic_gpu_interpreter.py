"""Runs the bodies of the Hopper kernels on a CPU, tile by tile, as plain arrays.

The interpreter that comes with Pallas knows neither left operands in registers nor inlined code.
This one is small since the kernels speak few words: buffers are arrays that start as NaN, copies
happen at once (zeros where a box leaves its array), warpgroups are threads and barriers count
arrivals as theirs do. What `tiles`, `blocks` and `exchange` write in registers is said again here
in a line or two of numpy: that the two agree was measured on the card. So the algebra of the
kernels, their masks and their indices are held to the oracle in every test run; races and layouts
are not.

A ROW is `[64]`; a COL is `[4, n]`, a row for each warp.
"""

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import mosaic_gpu
from pallas_kernels.kda.mosaic_gpu import (
    activate,
    blocks,
    chunks,
    decays,
    exchange,
    factors,
    gradients,
    inverse,
    masks,
    pieces,
    prepare,
    reverse,
    scan,
    tiles,
)

here = threading.local()


class Ref:
    """A window of an array, which it may leave; every axis is a place or (start, size)."""

    def __init__(self, base, dims=None, turned=False):
        self.base = base
        self.dims = dims or [(0, n) for n in base.shape]
        self.turned = turned

    @property
    def shape(self):
        shape = tuple(d[1] for d in self.dims if isinstance(d, tuple))
        return shape[::-1] if self.turned else shape

    ndim = property(lambda self: len(self.shape))
    T = property(lambda self: Ref(self.base, self.dims, not self.turned))
    at = property(lambda self: _At(self))

    def transpose(self, order):
        return Turned(self, order)

    def window(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if index and index[-1] is Ellipsis:
            index = index[:-1]
        todo, dims = list(index), []
        for d in self.dims:
            if not isinstance(d, tuple) or not todo:
                dims.append(d)
                continue
            i = todo.pop(0)
            if isinstance(i, slice):
                assert i == slice(None)
                dims.append(d)
            elif hasattr(i, "size") and hasattr(i, "start"):
                dims.append((d[0] + int(i.start), int(i.size)))
            else:
                dims.append(d[0] + int(i))
        return Ref(self.base, dims, self.turned)

    def _places(self):
        """Where the window lies in the array, and where that is in the window."""
        inner, outer = [], []
        for d, n in zip(self.dims, self.base.shape, strict=True):
            if isinstance(d, tuple):
                low, high = np.clip([d[0], sum(d)], 0, n)
                inner.append(slice(low, high))
                outer.append(slice(low - d[0], high - d[0]))
            else:
                inner.append(d)
        return tuple(inner), tuple(outer)

    def read(self):
        inner, outer = self._places()
        shape = self.shape[::-1] if self.turned else self.shape
        out = np.zeros(shape, self.base.dtype)
        out[outer] = self.base[inner]
        return jnp.asarray(out.T if self.turned else out)

    def write(self, value):
        inner, outer = self._places()
        value = np.asarray(value)
        if value.ndim == self.ndim + 1:  # a COL, the same in all warps
            value = value[0]
        value = value.T if self.turned else value
        assert value.dtype == self.base.dtype, (value.dtype, self.base.dtype)
        self.base[inner] = value[outer]

    def __getitem__(self, index):
        return self.window(index).read()

    def __setitem__(self, index, value):
        self.window(index).write(value)


class _At:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        return self.ref.window(index)


class Turned:
    """A buffer with its axes in another order, as copies see it."""

    def __init__(self, ref, order):
        self.ref, self.order = ref, order

    def read(self):
        return jnp.transpose(self.ref.read(), self.order)

    def write(self, value):
        self.ref.write(jnp.transpose(value, np.argsort(self.order)))


class Barrier:
    """Slots that complete a phase with every `arrivals` arrivals; threads wait for each in turn."""

    def __init__(self, arrivals, slots):
        self.arrivals, self.count = arrivals, [0] * slots
        self.moved = threading.Condition()
        self.at = self
        self.slot = None

    def __getitem__(self, slot):
        view = object.__new__(Barrier)
        view.__dict__ = self.__dict__ | {"slot": int(slot)}
        return view

    def arrive(self):
        with self.moved:
            self.count[self.slot or 0] += 1
            self.moved.notify_all()

    def wait(self):
        key = (id(self.count), self.slot or 0)
        phase = here.phases[key] = here.phases.get(key, 0) + 1
        with self.moved:
            done = self.moved.wait_for(
                lambda: self.count[self.slot or 0] >= phase * self.arrivals, timeout=60
            )
        assert done, "a warpgroup waits for ever"


class Accumulator:
    def __init__(self, shape, dtype):
        self.shape, self.value = shape, jnp.zeros(shape, dtype)

    def __setitem__(self, index, value):
        assert index is Ellipsis and value.shape == self.shape
        self.value = value


def _array(x):
    return (x.read() if isinstance(x, Ref) else x).astype(jnp.float32)


def _wgmma(acc, a, b):
    assert a.shape[0] == 64 and acc.shape == (64, b.shape[1]), (a.shape, b.shape)
    acc.value = acc.value + _array(a) @ _array(b)


def _buffer(kind):
    if isinstance(kind, plgpu.RefUnion):
        first, *others = kind.refs
        one = _buffer(first)
        same = [other for other in others if getattr(other, "shape", None) == first.shape]
        rest = [other for other in others if other not in same]
        return (one, *([one] * len(same)), *(jax.tree.map(_buffer, other) for other in rest))
    if isinstance(kind, plgpu.Barrier):
        return Barrier(kind.num_arrivals, int(np.prod(kind.num_barriers)))
    dtype = np.dtype(kind.dtype)
    blank = np.full(kind.shape, 0 if dtype.kind == "i" else np.nan)
    return Ref(blank.astype(dtype))


class _LeftError(Exception):
    """A program that ended itself."""


def _leave_if(condition):
    if bool(condition):
        raise _LeftError


def _kernel(body, *, out_type, grid, scratch_types, num_threads=1, **_):
    def run(*arrays):
        several = isinstance(out_type, tuple)
        shapes = out_type if several else (out_type,)
        outs = [Ref(np.full(s.shape, np.nan).astype(s.dtype)) for s in shapes]
        inputs = [Ref(np.asarray(x)) for x in arrays]
        for program in itertools.product(*map(range, grid)):
            buffers = [_buffer(kind) for kind in scratch_types]
            errors = []

            def group(g, program=program, buffers=buffers, errors=errors):
                here.phases, here.program, here.group = {}, program[0], jnp.int32(g)
                try:
                    body(*inputs, *outs, *buffers)
                except _LeftError:
                    return
                except BaseException as error:
                    errors.append(error)
                    raise

            if num_threads == 1:
                group(0)
                continue
            threads = [threading.Thread(target=group, args=(g,)) for g in range(num_threads)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert not errors, errors[0]
        out = tuple(jnp.asarray(o.base) for o in outs)
        return out if several else out[0]

    return run


def _loop(low, high, body, carry):
    for i in range(int(low), int(high)):
        carry = body(jnp.int32(i), carry)
    return carry


def _when(condition):
    def decorate(f):
        if bool(condition):
            f()

    return decorate


def _copy_out(source, target, predicate=True, *, commit_group=True):
    if bool(predicate):
        target.write(source.read())


def _copy_rows(source, target, count):
    tokens = next(i for i, d in enumerate(target.dims) if isinstance(d, tuple))
    dims = list(target.dims)
    dims[tokens] = (dims[tokens][0], int(count))
    Ref(target.base, dims).write(source.read()[: int(count)])


def _copy_in(source, target, barrier):
    target.write(source.read())
    barrier.arrive()


def _blocks(x):
    return jnp.asarray(x, jnp.float32).reshape(4, 16, -1)


def _tile(x):
    return x.reshape(64, -1)


def _load(ref, layout=tiles.TILE):
    x = ref.read()
    return jnp.broadcast_to(x, (4, *x.shape)) if layout == tiles.COL else x


def _zeros(shape, layout=tiles.TILE):
    return jnp.zeros((4, *shape) if layout == tiles.COL else shape, jnp.float32)


def _iota(dtype, shape, dim, layout):
    x = lax.broadcasted_iota(dtype, shape, dim)
    return jnp.broadcast_to(x, (4, *shape)) if layout == tiles.COL else x


def _by_warp(*choices):
    if choices[0].shape[0] == 4:
        return jnp.stack([c[w] for w, c in enumerate(choices)])
    return jnp.concatenate([c[16 * w : 16 * w + 16] for w, c in enumerate(choices)])


def _suffix(x):
    return _tile(jnp.cumsum(_blocks(x)[:, ::-1], axis=1)[:, ::-1])


def _moved_down(x):
    return _tile(jnp.pad(_blocks(x), ((0, 0), (1, 0), (0, 0)))[:, :-1])


def _store_totals(tables, ref):
    ref.write(tables.read()[:, 1:].sum(axis=1))


def _halfway(x, level):
    size = 2 ** int(level)
    return x[np.arange(64) // (2 * size) * 2 * size + size - 1]


def _pairs(acc, a, b, size=16):
    product = jnp.einsum("wid,wjd->wij", _blocks(a), _blocks(b))
    i, j = np.mgrid[:16, :16]
    joins = (size == 16) | ((i // size == j // size + 1) & (i // (2 * size) == j // (2 * size)))
    return acc + _tile(jnp.where(joins, product, 0))


def _times(acc, a, x, transpose):
    sides = "wji,wjd->wid" if transpose else "wij,wjd->wid"
    return acc + _tile(jnp.einsum(sides, _blocks(a), _blocks(x)))


def _shared_times(acc, pairs, x, block, of, transpose=False):
    pairs, x, out = _array(pairs), _blocks(_array(x)), [*_blocks(acc)]
    for w, place in enumerate(block):
        if place is not None:
            i, j = (slice(16 * n, 16 * n + 16) for n in place)
            matrix = pairs[i, j].T if transpose else pairs[i, j]
            out[w] = out[w] + matrix @ x[of[w]]
    return _tile(jnp.stack(out))


def _shared_pairs(accs, rows, x, block):
    columns = _blocks(_array(x))[block]
    return tuple(acc + _array(a) @ columns.T for acc, a in zip(accs, rows, strict=True))


def _own(x):
    return jnp.concatenate([x[16 * w : 16 * w + 16, 16 * w : 16 * w + 16] for w in range(4)])


def _store(rows, ref):
    for w, row in enumerate(rows):
        ref[1 + w] = row


BLOCKS = {
    "cumsum": lambda x: _tile(jnp.cumsum(_blocks(x), axis=1)),
    "moved_down": _moved_down,
    "suffix_sum": _suffix,
    "halfway": _halfway,
    "last_row": lambda x: x[15::16],
    "pairs": _pairs,
    "times": _times,
    "shared_pairs": _shared_pairs,
    "shared_times": _shared_times,
    "own": _own,
    "diagonal": lambda x: jnp.concatenate([jnp.diagonal(b) for b in _blocks(x)]),
}
INVERSE = {
    "of_blocks": lambda x: _tile(jnp.linalg.inv(jnp.eye(16) + jnp.tril(_blocks(x), -1))),
    "product": lambda a, b: _tile(_blocks(a) @ _blocks(b)),
}
EXCHANGE = {
    "store_decays": lambda x, ref: _store(jnp.exp2(x[15::16]), ref),
    "store_firsts": lambda x, ref: _store(x[::16], ref),
    "store_lasts": lambda x, ref: _store(x[15::16], ref),
    "store_totals": _store_totals,
    "store_column_sums": lambda x, ref: _store(_blocks(x).sum(axis=1), ref),
    "load_row": lambda ref, table, n: jnp.stack([ref[row] for row in table]),
    "store_first_warp": lambda x, ref: ref.write(x[0]),
}
TILES = {
    "zeros": _zeros,
    "by_warp": _by_warp,
    "read": lambda acc, in_flight=0: acc.value,
    "product": lambda shape, *pairs: sum(_array(a) @ _array(b) for a, b in pairs),
    "exp2": lambda x, layout=None: jnp.exp2(x),
    "exp2_anew": lambda x, sign, shift, table: jnp.exp2(sign * x + shift + table[0][0]),
    "linear": lambda x, factor, start: x * factor + jnp.repeat(start, 16, axis=0),
    "reciprocal": lambda x, layout=None: 1 / x,
    "warpgroup_barrier": lambda: None,
    "copy_rows": _copy_rows,
    "load_transposed": lambda ref: ref.read().T,
    "store_transposed": lambda x, ref: ref.write(x.T),
    "leave_if": _leave_if,
    "keep_columns": lambda x, keeps: jnp.where(keeps[:1] != 0, x, 0),
    "load": _load,
    "wide": lambda x: x.astype(jnp.float32),
    "cols": lambda x, shape: jnp.broadcast_to(jnp.repeat(x, 16, axis=0), shape),
    "rows": lambda x, shape: jnp.broadcast_to(x[:, None], shape),
}
NOTHING = ("commit_smem", "wait_smem_to_gmem", "set_max_registers", "commit_smem_to_gmem_group")
PLGPU = {
    **dict.fromkeys((*NOTHING, "wgmma_wait"), lambda *_, **__: None),
    "kernel": _kernel,
    "ACC": Accumulator,
    "wgmma": _wgmma,
    "copy_gmem_to_smem": _copy_in,
    "copy_smem_to_gmem": _copy_out,
    "barrier_wait": lambda barrier: barrier.wait(),
    "barrier_arrive": lambda barrier: barrier.arrive(),
    "broadcasted_iota": _iota,
    "layout_cast": lambda x, layout: x,
}
LAX = {
    "fori_loop": _loop,
    "cond": lambda p, yes, no, *x: yes(*x) if bool(p) else no(*x),
    "axis_index": lambda name: here.group if name == "group" else jnp.int32(here.program),
}
PL = {"when": _when, "run_scoped": lambda f, *kinds: f(*kinds)}


class _Words:
    """A module with some of its words said otherwise."""

    def __init__(self, module, words):
        self.__dict__ |= {"module": module} | words

    def __getattr__(self, name):
        return getattr(self.module, name)


@contextlib.contextmanager
def interpreted():
    """Within it `mosaic_gpu.run` runs here, eagerly, forward and backward."""
    with pytest.MonkeyPatch.context() as patch:
        for words, module in (
            (BLOCKS, blocks),
            (INVERSE, inverse),
            (EXCHANGE, exchange),
            (TILES, tiles),
        ):
            for name, word in words.items():
                patch.setattr(module, name, word)
        tools = (tiles, blocks, exchange, activate, chunks, inverse, decays, masks, factors)
        for module in (*tools, prepare, scan, pieces, reverse, gradients):
            for name in ("load", "wide", "cols", "rows", "read", "exp2"):
                if hasattr(module, name):
                    patch.setattr(module, name, TILES[name])
            for name, known, words in (("plgpu", plgpu, PLGPU), ("lax", lax, LAX), ("pl", pl, PL)):
                if hasattr(module, name):
                    patch.setattr(module, name, _Words(known, words))
        for name in ("_forward_kernels", "_backward_kernels"):
            patch.setattr(mosaic_gpu, name, getattr(mosaic_gpu, name).__wrapped__)
        yield
