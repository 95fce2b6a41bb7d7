"""`kda` under jax's transformations, `kda_step`, and what memory a gradient takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.kda import kda, kda_step, scaling
from pallas_kernels.kda.tolerances import TOLERANCES, relative_rms
from tests.pallas_kernels.kda_suite import QUICK, rng

OPTIONS = {"gate_form": "bounded", "beta_form": "logit"}


def inputs(B=2, T=70, H=1, D=8):
    r = rng("transforms")
    x = {n: r.normal(size=(B, T, H, D)) for n in ("q", "k", "v", "gate")}
    x |= {"beta": r.normal(size=(B, T, H)), "initial_state": r.normal(size=(B, 1, H, D, D))}
    x |= {"a_log": 0.1 * r.normal(size=H), "dt_bias": r.normal(size=(H, D))}
    return {n: jnp.float32(y) for n, y in x.items()}


def loss(x, **options):
    o, state = kda(**x, **OPTIONS, return_final_state=True, **options)
    return (o * jnp.cos(o)).sum() + (state**2).sum()


@pytest.fixture(scope="module")
def expected():
    reference = functools.partial(loss, implementation="recurrent")
    return quick(jax.value_and_grad(reference))(inputs())


@pytest.fixture(params=["chunked", pytest.param("mosaic_tpu", marks=pytest.mark.full)])
def total(request):
    return functools.partial(loss, implementation=request.param)


def quick(f):
    return jax.jit(f, compiler_options=QUICK)


def agree(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_rms(a, e) < TOLERANCES["float32"]["dq"]


def test_jit_and_remat(total, expected):  # and the compiler's usual options
    agree(jax.jit(jax.value_and_grad(jax.checkpoint(total)))(inputs()), expected)


def test_donated_inputs(total, expected):
    call = jax.jit(jax.value_and_grad(total), donate_argnums=0, compiler_options=QUICK)
    agree(call(inputs()), expected)


def test_vmap(total, expected):
    x = inputs()
    parameters = {n: x.pop(n) for n in ("a_log", "dt_bias")}

    def sum_of_rows(x, parameters):
        rows = jax.tree.map(lambda y: y[:, None], x)
        return jax.vmap(lambda row: total(row | parameters))(rows).sum()

    call = jax.value_and_grad(sum_of_rows, argnums=(0, 1))
    value, (dx, dparameters) = quick(call)(x, parameters)
    agree((value, dx | dparameters), expected)


def test_vmap_over_one_argument(total):
    x = inputs()
    values = jnp.stack([x["v"], -2 * x["v"]])

    def call(one):
        return quick(jax.value_and_grad(lambda v: jax.vmap(lambda v: one(x | {"v": v}))(v).sum()))

    reference = functools.partial(loss, implementation="recurrent")
    agree(call(total)(values), call(reference)(values))


def test_inside_a_scan():
    x = inputs()
    x["gate"] -= 6  # at e^-75, what is left of a state's gradient is rounding
    state = x.pop("initial_state")

    def layers(state):
        def layer(state, _):
            return kda(**x, initial_state=state, return_final_state=True, **OPTIONS)[::-1]

        return (jax.lax.scan(layer, state, length=2)[0] ** 2).sum()

    def twice(state):
        for _ in range(2):
            _, state = kda(
                **x,
                initial_state=state,
                return_final_state=True,
                implementation="recurrent",
                **OPTIONS,
            )
        return (state**2).sum()

    agree(quick(jax.grad(layers))(state), quick(jax.grad(twice))(state))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(total, expected, check_vma):
    x = inputs()
    mesh = jax.make_mesh((1,), ("data",))
    specs = {n: P() if n in ("a_log", "dt_bias") else P("data") for n in x}
    with jax.set_mesh(mesh):
        x = {n: jax.reshard(y, specs[n]) for n, y in x.items()}

        def of_all(x):
            local = jax.shard_map(
                lambda x: jax.lax.psum(total(x), "data"),
                in_specs=(specs,),
                out_specs=P(),
                check_vma=check_vma,
            )
            return local(x)

        agree(quick(jax.value_and_grad(of_all))(x), expected)


def second(implementation):
    x = {n: y for n, y in inputs(B=1, T=5, D=4).items() if n not in ("a_log", "dt_bias")}

    def total(v, q):
        return loss(x | {"v": v, "q": q}, implementation=implementation)

    def of_values(v):
        return (jax.grad(total)(v, x["q"]) ** 2).sum()

    def of_cotangents(do):
        def o(v):
            return kda(**x | {"v": v}, **OPTIONS, implementation=implementation)[0]

        return (jax.vjp(o, x["v"])[1](do)[0] ** 2).sum()

    return x["v"], of_values, of_cotangents


@pytest.mark.full
def test_second_derivatives():
    agree(*(quick(jax.grad(f))(v) for v, f, _ in (second("chunked"), second("recurrent"))))


@pytest.mark.parametrize("which", [1, 2])
def test_kernels_say_that_they_have_no_second_derivatives(which):
    v, *functions = second("mosaic_tpu")
    with pytest.raises(NotImplementedError, match=r"'mosaic_tpu' has no second .*'chunked' has"):
        jax.eval_shape(jax.grad(functions[which - 1]), v)


@pytest.mark.xfail(
    raises=ValueError, strict=True, reason="jax: the interpreter reads an index map's table"
)
def test_a_table_that_varies_in_an_index_map():
    """Why packed states of the TPU kernels, whose blocks are found in tables, need check_vma=False
    on a CPU. Compiled for a TPU they do not."""

    def copy(table, x):
        return pl.pallas_call(
            lambda table, x, y: y.__setitem__(..., x[...]),
            out_shape=jax.ShapeDtypeStruct(
                x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(1,),
                in_specs=[pl.BlockSpec((8, 128), lambda i, table: (table[i], 0))],
                out_specs=pl.BlockSpec((8, 128), lambda i, table: (i, 0)),
            ),
            interpret=True,
        )(table, x)

    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        shapes = [(1,), jnp.int32], [(8, 128), jnp.float32]
        arguments = (jax.reshard(jnp.zeros(*shape), P("data")) for shape in shapes)
        jax.jit(jax.shard_map(copy, in_specs=P("data"), out_specs=P("data"))).lower(*arguments)


def test_float64_stays_float64_and_narrow_types_come_back():
    def dtypes(dtype, state):
        x = {n: jax.ShapeDtypeStruct(y.shape, dtype) for n, y in inputs().items()}
        x |= {"initial_state": jax.ShapeDtypeStruct((2, 1, 1, 8, 8), state)}
        call = functools.partial(kda, return_final_state=True, **OPTIONS)
        return [y.dtype for y in jax.eval_shape(lambda x: call(**x), x)]

    assert dtypes(jnp.bfloat16, jnp.float32) == [jnp.bfloat16, jnp.float32]
    with jax.enable_x64(True):
        assert dtypes(jnp.float64, jnp.float64) == [jnp.float64, jnp.float64]


def test_steps_are_the_row_token_by_token_in_a_donated_state():
    x = inputs(T=5)
    x |= {"v": jnp.concatenate([x["v"], -x["v"]], axis=2)}  # two value heads to one key head
    for n in ("gate", "beta", "a_log", "dt_bias", "initial_state"):
        axis = {"a_log": 0, "dt_bias": 0}.get(n, 2)
        x[n] = jnp.repeat(x[n], 2, axis=axis)
    o, final = kda(**x, **OPTIONS, return_final_state=True, implementation="recurrent")
    state = x.pop("initial_state")[:, 0]
    parameters = {n: x.pop(n) for n in ("a_log", "dt_bias")}
    step = jax.jit(functools.partial(kda_step, **OPTIONS), donate_argnames="state")
    for t in range(5):
        token = {n: y[:, t] for n, y in x.items()}
        old = state
        out, state = step(**token, **parameters, state=state)
        assert old.is_deleted()
        assert relative_rms(out, o[:, t]) < 1e-6
    assert relative_rms(state, final[:, 0]) < 1e-6


def temporary_mib(tokens, documents):
    program = scaling.compile_for(scaling.with_gradients, tokens, 4, 128, documents)
    return scaling.temporary_mib(program)


def test_a_gradient_of_16384_tokens_takes_less_than_a_gibibyte():
    assert temporary_mib(16384, documents=8) < 512


@pytest.mark.full
@pytest.mark.parametrize("documents", [0, 8])
def test_memory_is_linear_in_the_length(documents):
    lengths = (4096, 16384, 65536)
    slopes = np.diff([temporary_mib(T, documents) for T in lengths]) / np.diff(lengths)
    assert slopes[1] < 1.25 * slopes[0]


@pytest.mark.full
def test_the_table_of_time_and_memory(monkeypatch, capsys):
    sizes = ["--tokens", "70", "--heads", "1", "--width", "8"]
    monkeypatch.setattr("sys.argv", ["scaling", *sizes])
    scaling.main()
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[0] == "70" and len(row) == 7
