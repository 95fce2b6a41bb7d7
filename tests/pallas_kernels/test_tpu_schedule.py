"""The static cost of a TPU kernel: reading bundles, executing them, timing them, reporting."""

import functools
import json
import math
import shutil
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.tpu_schedule import bundles, hlo, machine, operands, report, table, worker
from pallas_kernels.tpu_schedule.chips import CHIPS
from pallas_kernels.tpu_schedule.report import read
from tests.pallas_kernels.schedule_cases import (
    BLOCK_BYTES,
    JUMPS,
    RECORDED,
    STEPS,
    TOPOLOGY,
    pick,
)

V6E = CHIPS["v6e"]
PICK = f"{pick.__module__}:{pick.__name__}"


def program(*lines: str) -> bundles.Program:
    """A program of bundles, `> body # Start region 1`: in a loop, with what a comment says."""
    text = []
    for k, line in enumerate(lines):
        depth = ">" if line.startswith(">") else ""
        body, _, comment = line.removeprefix(">").partition("# ")
        text.append(f"  {hex(k) if k else 0}   : {depth} {{ {body} }} /* {comment} */")
    return bundles.parse("header\n" + "\n".join(text))


def run(*lines: str, contents=None) -> machine.Execution:
    return machine.Machine(program(*lines), V6E, contents or {}).run()


def test_an_instruction_is_read():
    found = program(
        "%v3_v1 = vmatmul.mubr.bf16.gmra.mrb[4].mxu1 (!%p2_p0), %v1_v0  ;;"
        "  %s5_s2 = sadd.s32 (%p2_p0, %s4_s9), %s3_s1, 4294967295",
        "%7 = sst [smem:[#allocation3 + %s5_s2]] /*sx=*/%s4_s1 ;; %8 = sbr.rel target = $region12",
        "%9 = vadd.f32 %v1_v0, %v3_v1 # Start region 12 :: Start/End empty region 13",
    )
    matmul, add = found.bundles[0].instructions
    assert (matmul.unit, matmul.packed, matmul.predicate) == ("mxu1", True, ("%p2_p0", True))
    assert matmul.sources == ("v0",) and matmul.args == ()
    assert add.args == ("%s3_s1", "4294967295") and add.predicate == ("%p2_p0", False)
    assert add.otherwise == "%s4_s9" and add.sources == ("s1",) and not add.packed
    store, branch = found.bundles[1].instructions
    assert store.args == ("[smem:[#allocation3 + %s5_s2]]", "%s4_s1")
    assert branch.op == "sbr.rel" and branch.args[-1].endswith("$region12")
    assert found.bundles[2].regions == {"12", "13"} and not found.bundles[1].regions


LOOP = (
    "%s1_s0 = smov.u32 0",
    "> %s2_s0 = sphi %s1_s0, %s3_s0 # Start region 1",
    "> %s3_s0 = sadd.s32 1, %s2_s0",
    "> %p4_p0 = scmp.lt.s32.totalorder %s3_s0, 5",
    "> %6 = sbr.rel (%p4_p0) target = $region1",
    *[">"] * V6E.branch_delay,
    "",
)


def test_a_loop_runs_as_often_as_its_counter_says():
    result = run(*LOOP)
    body = (1, 5 + V6E.branch_delay)
    assert result.visits == {(0, 1): 1, body: 5, (body[1], body[1] + 1): 1}
    assert result.bundles == 2 + 5 * (body[1] - 1) and result.complete
    assert result.compute_cycles >= result.bundles and not result.unknown_branches


def test_a_branch_on_what_nobody_wrote_is_marked():
    load = "%s1_s0 = sld [smem:[#allocation7]]"
    test = "%p2_p0 = scmp.ne.s32.totalorder %s1_s0, 0"
    branch = "%3 = sbr.rel (%p2_p0) target = $region1"
    rest = [*[""] * V6E.branch_delay, "", "", "# Start region 1"]
    assert run(load, test, branch, *rest).unknown_branches == 1
    store = "%4 = sst [smem:[#allocation7]] 1"
    known = run(store, load, test, branch, *rest)
    assert known.unknown_branches == 0
    assert known.bundles == run(load, test, branch, *rest).bundles + 1 - 2  # jumps over two


@pytest.mark.parametrize(
    ("op", "a", "b", "expected"),
    [
        ("sadd.s32", 2147483647, 1, -(2**31)),
        ("ssub.s32", 0, 1, -1),
        ("smul.u32", 65536, 65536, 0),
        ("smulhi.u32", 4294967295, 4294967295, -2),
        ("sshrl.u32", 4294967295, 28, 15),
        ("sshra.s32", 4294967295, 28, -1),
        ("sshll.u32", 1, 31, -(2**31)),
        ("sxor.u32", 4294967295, 1, -2),
    ],
)
def test_scalar_arithmetic_has_32_bits(op, a, b, expected):
    """Whether the branch is taken tells the value."""
    lines = [
        f"%s1_s0 = {op} {a}, {b}",
        f"%p2_p0 = scmp.eq.s32.totalorder %s1_s0, {expected & 0xFFFFFFFF}",
        "%3 = sbr.rel (%p2_p0) target = $region1",
        *[""] * V6E.branch_delay,
    ]
    skipped = run(*lines, *[""] * 50, "# Start region 1")
    assert skipped.bundles == len(lines) + 1 and not skipped.unknown_branches


def matmul(unit: int, slot: int, kind: str = "bf16") -> str:
    return f"%9 = vmatmul.mubr.{kind}.gmra.mrb[{slot}].mxu{unit} %v0_v0"


def pop(unit: int, slot: int) -> str:
    return f"%v1_v1 = vpop.f32.mrb[{slot}].mxu{unit}"


@pytest.mark.parametrize(
    ("lines", "cycles", "stalls"),
    [
        (["%v1_v1 = vadd.f32 %v0_v0, %v0_v0"] * 3, 3, {}),
        (
            ["%v1_v1 = vadd.f32 %v0_v0, %v0_v0", "%v2_v2 = vadd.f32 %v1_v1, %v1_v1"],
            3,
            {"valu": 1},
        ),
        ([matmul(0, 0), pop(0, 0)], 1 + V6E.mxu_latency, {"mxu_result": V6E.mxu_latency - 1}),
        ([matmul(0, 0), pop(0, 1)], 1 + V6E.mxu_latency, {"mxu_result": V6E.mxu_latency - 1}),
        ([matmul(0, 0), matmul(1, 0)], 2, {}),
        ([matmul(0, 0), matmul(0, 4)], 1 + V6E.matmul.packed, {"mxu_port": 7}),
        ([matmul(0, 0, "f32"), matmul(0, 4)], 1 + V6E.matmul.f32, {"mxu_port": 3}),
        (
            ["%1 = vadd.xlane.f32.xlu0 %v0_v0", "%2 = vrot.lane.b32.xlu0 %v0_v0"],
            1 + V6E.xlu_interval,
            {"xlu": 3},
        ),
    ],
)
def test_the_scoreboard(lines, cycles, stalls):
    result = run(*lines)
    assert (result.compute_cycles, result.stalls) == (cycles, stalls)


def operand(index: int, space: str = "hbm", shape: str = "f32[1024,128]", kind: str = "input"):
    what = f"[shape: {shape}, index: {index}, kind: {kind}, shape index: {{}}]"
    return f"%s{10 + index}_s{index} = inlined_call_operand.{space} {what}"


def test_copies_share_the_channel_to_hbm():
    granules = 16384
    size = 32 * granules
    copies = [
        operand(0),
        f"%2 = dma.hbm_to_vmem %s10_s0, {granules}, [#allocation1], [#allocation2]",
        f"%3 = dma.hbm_to_vmem %s10_s0, {granules}, [#allocation1], [#allocation3]",
        f"%4 = dma.done.wait [#allocation3], {granules}",
    ]
    result = run(*copies)
    assert (result.hbm_in, result.hbm_out) == (2 * size, 0)
    transfer = size / V6E.hbm_bytes_per_cycle
    assert result.dma_cycles == pytest.approx(2 * transfer + V6E.dma_in - 2)
    first = run(*copies[:3], f"%4 = dma.done.wait [#allocation2], {granules}")
    assert first.dma_cycles == pytest.approx(transfer + V6E.dma_in - 2)


def test_an_operand_in_scalar_memory_is_what_it_was_given():
    lines = [
        operand(0),
        "%2 = dma.hbm_to_smem %s10_s0, 16, [#allocation1], [#allocation2]",
        "%3 = dma.done.wait [#allocation2], 16",
        "%s4_s4 = sld [smem:[#allocation1 + 3]]",
        "%p5_p0 = scmp.eq.s32.totalorder %s4_s4, 33",
        "%6 = sbr.rel (%p5_p0) target = $region1",
        *[""] * V6E.branch_delay,
        *[""] * 9,
        "# Start region 1",
    ]
    words = operands.words(np.arange(0, 88, 11, dtype=np.int32), (128,))
    known, other, unknown = (run(*lines, contents=c) for c in ({0: words}, {0: [0] * 128}, {}))
    assert known.bundles + 9 == other.bundles == unknown.bundles
    assert (known.unknown_branches, other.unknown_branches, unknown.unknown_branches) == (0, 0, 1)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((5,), (128,)), ((16, 8), (8, 128)), ((5, 300), (8, 128)), ((3, 4, 200), (4, 128))],
)
def test_words_lie_in_tiles(shape, tile):
    values = np.arange(1, math.prod(shape) + 1).reshape(shape)
    found = operands.words(values, tile)
    padded = [-(-n // step) * step for n, step in zip(shape[-len(tile) :], tile, strict=True)]
    for place in np.ndindex(shape):
        at = 0
        for n, size in zip(place[: -len(tile)], shape[: -len(tile)], strict=True):
            at = at * size + n
        last = place[-len(tile) :]
        for n, step, size in zip(last, tile, padded, strict=True):
            at = at * (size // step) + n // step
        for n, step in zip(last, tile, strict=True):
            at = at * step + n % step
        assert found[at] == values[place]
    assert len(found) == math.prod(shape[: -len(tile)]) * math.prod(padded)


def test_values_that_reach_a_kernel_are_computed_as_far_as_they_are_known():
    @jax.custom_vjp
    def call(starts, x):
        copy = pl.pallas_call(
            lambda *refs: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )
        return copy(starts, x)

    call.defvjp(lambda *args: (call(*args), None), lambda *_: (None, None))

    def fn(starts, x, unknown):
        double = jax.jit(lambda s: jnp.cumsum(s) * 2)(starts)
        return call(double, x), call(double + unknown, x)

    starts = np.array([1, 2, 3], np.int32)
    x = jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)
    args = (starts, x, jax.ShapeDtypeStruct((), jnp.int32))
    first, second = operands.kernel_calls(jax.make_jaxpr(fn)(*args), args)
    assert first.shapes == second.shapes == ["s32[3]", "bf16[2,4]"]
    assert first.values[0].tolist() == [2, 6, 12] and first.values[1] is None
    assert second.values == [None, None]


HLO = """
%body (p: s32[]) -> s32[] {
  %copy.1 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  ROOT %in.1 = s32[4,8]{1,0:T(4,128)S(1)} bitcast(%copy.1)
}

%condition (p: s32[]) -> pred[] {
  %bound = s32[]{:T(128)} constant(7)
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %out = f32[8]{0:T(128)} copy(%x), backend_config={SCOPED[{"memory_space":"1","size":"4096"}]}
  ROOT %w = s32[]{:T(128)} while(%c), condition=%condition, body=%body
}
""".replace("SCOPED", '"used_scoped_memory_configs":')


def test_hlo():
    module = hlo.Module.parse(HLO)
    assert (module.executions("in.1"), module.executions("out")) == (7, 1)
    assert module.copied_bytes() == 7 * 8 * 128 * 4
    assert module.tile("in.1") == (4, 128) and module.tile("copy.1") is None
    assert module.scoped_vmem("out") == 4096 and module.scoped_vmem("in.1") == 0


@pytest.fixture
def recorded(tmp_path):
    """A function that reads the recorded kernel as if its blocks had been these."""
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    ((shapes, _),) = json.loads((RECORDED / worker.CALLS).read_text())

    def with_blocks(*blocks):
        calls = [[shapes, [found, None]] for found in blocks]
        (tmp_path / worker.CALLS).write_text(json.dumps(calls))
        (op,) = read(tmp_path, "pick", TOPOLOGY, {}).ops
        return op

    return with_blocks


def check_fetches(op, fetched):
    """Of the kernel `pick`: a block is fetched where it differs from the one before."""
    scalars = op.hbm_in - fetched * BLOCK_BYTES
    assert scalars in (0, 512)  # a tile, if XLA did not bring it to VMEM
    assert op.hbm_out == STEPS * BLOCK_BYTES
    assert op.complete and not op.unknown_branches and op.kind == "kernel" and op.steps == STEPS
    assert op.cycles == op.compute_cycles + op.dma_cycles and op.compute_cycles >= op.bundles
    assert max(op.floors.values()) <= op.cycles
    assert op.vmem >= 4 * BLOCK_BYTES  # two windows in, two out


@pytest.mark.parametrize(
    ("blocks", "fetched"), [([4] * 8, 1), ([1, 2] * 4, 8), ([0, 0, 1, 1, 2, 2, 0, 0], 4)]
)
def test_blocks_are_those_of_the_scalars(recorded, blocks, fetched):
    check_fetches(recorded(blocks), fetched)


def test_branches_are_those_of_the_scalars(recorded):
    even, half, odd = (recorded(blocks) for blocks in ([0] * 8, [0, 1] * 4, [1] * 8))
    assert half.uses["EUP"] - even.uses["EUP"] == odd.uses["EUP"] - half.uses["EUP"] > 0
    assert even.bundles < half.bundles < odd.bundles


def test_calls_that_differ_leave_a_value_unknown(recorded):
    assert recorded([1] * 8, [1] * 8).unknown_branches == 0
    unknown = recorded([1] * 8, [2] * 8)
    assert unknown.unknown_branches > 0 and unknown == recorded()


def test_the_recorded_kernel():
    """To the cycle, so that no change of the model goes unseen."""
    result = read(RECORDED, "pick", TOPOLOGY, {})
    (op,) = result.ops
    assert (op.bundles, op.compute_cycles, op.cycles) == (1095, 1201, 4853)
    assert op.stalls == {"scalar": 100, "eup": 6}
    check_fetches(op, 4)
    assert result.ms == pytest.approx(4853 / CHIPS["tpu7x"].clock * 1e3)
    found = result.as_json()
    assert json.loads(json.dumps(found))["hbm_bytes"] == result.hbm_bytes == 12 * BLOCK_BYTES
    head, columns, row, total = table(result).splitlines()
    assert "TPU7x" in head and row.startswith("pick.1 ") and total.startswith("0.002 ms = kernels")
    assert len(columns) >= len(row.rstrip().rsplit("  ", 1)[0])


def test_bad_input(monkeypatch):
    with pytest.raises(ValueError, match=r"^topology: 'v9:2x2' does not begin with one of v5e, "):
        report(PICK, "v9:2x2")
    for found in ("0.0.48.1", None):

        def version(name, found=found):
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(metadata, "version", version)
        with pytest.raises(
            ModuleNotFoundError, match=rf"^libtpu .* is needed, found {found or 'n'}"
        ):
            report(PICK, TOPOLOGY)


needs_libtpu = pytest.mark.skipif(worker.missing() is not None, reason=f"{worker.missing()}")


@functools.cache
def compiled(topology, jumps):
    return report(PICK, topology, jumps=jumps and list(jumps))


@pytest.mark.full
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_a_kernel_compiled_anew(topology):
    result = compiled(topology, tuple(JUMPS))
    (op,) = (op for op in result.ops if op.kind == "kernel")
    check_fetches(op, 4)
    (even,) = (op for op in compiled(topology, (0,) * STEPS).ops if op.kind == "kernel")
    check_fetches(even, 1)
    assert even.uses["EUP"] < op.uses["EUP"] and even.cycles < op.cycles
    assert result.ms >= op.ms > 0 and result.ops[0].ms >= result.ops[-1].ms
    (unknown,) = (op for op in compiled(topology, None).ops if op.kind == "kernel")
    assert unknown.unknown_branches and unknown.cycles == even.cycles


@pytest.mark.full
@needs_libtpu
def test_a_case_that_does_not_trace():
    with pytest.raises(RuntimeError, match=r"pick .* does not compile for tpu7x(.|\n)*ValueError"):
        report(PICK, TOPOLOGY, jumps="three")
