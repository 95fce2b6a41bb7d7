"""The planner: what it reads from a program, what it refuses, and a small model on a TPU's mesh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.hlo import Collective, read
from experiments.plan import device_of

PROGRAM = """HloModule step, is_scheduled=true

%wrapped (p: bf16[8,16]) -> bf16[32,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[32,16]{1,0:T(8,128)} all-gather(%p), replica_groups=[2,4]<=[2,2,2]T(1,0,2), dimensions={0}
}

%cond (arg: (s32[], f32[4,4])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(6)
  ROOT %lt.9 = pred[] compare(%i, %constant.4), direction=LT
}

%body (arg: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %arg = (s32[], f32[4,4]{1,0}) parameter(0)
  %fusion.1 = bf16[32,16]{1,0} fusion(%x), kind=kCustom, calls=%wrapped, backend_config={"estimated_cycles":"100"}
  %reduce-scatter.1 = (f32[2,4]{1,0}, bf16[4]{0}) reduce-scatter(%y, %z), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  ROOT %tuple = (s32[], f32[4,4]{1,0}) tuple(%i, %y)
}

%last (arg: f32[4,4]) -> f32[4,4] {
  ROOT %all-to-all = f32[4,4]{1,0} all-to-all(%arg), replica_groups=mesh['fsdp'=2,'context'=2,'tensor'=2] {'tensor','fsdp'}
}

ENTRY %main.9 (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %while.1 = (s32[], f32[4,4]{1,0}) while(%t), condition=%cond, body=%body
  %conditional.1 = f32[4,4]{1,0} conditional(%a), true_computation=%last, false_computation=%other
  %permute-start = (f32[4,4]{1,0}, f32[4,4]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%a), source_target_pairs={{0,2},{2,0}}
  %all-reduce.3 = f32[4,4]{1,0} all-reduce(%a), replica_groups=mesh['axis_0'=8] {'axis_0'}, to_apply=%add, backend_config={"estimated_cycles":"9223372036854775807"}
  %permute-done = f32[4,4]{1,0} collective-permute-done(%permute-start), backend_config={"estimated_cycles":"7"}
  ROOT %all-reduce = f32[4,4]{1,0} all-reduce(%permute-done), replica_groups={}, to_apply=%add, backend_config={"estimated_cycles":"30"}
}
"""  # noqa: E501


def test_collectives_are_counted_as_often_as_they_run():
    program = read(PROGRAM)
    assert program.collectives == (
        Collective("all-gather", 6, 32 * 16 * 2, (0, 1, 4, 5)),
        Collective("reduce-scatter", 6, 2 * 4 * 4 + 4 * 2, (0, 4)),
        Collective("all-to-all", 1, 64, (0, 1, 4, 5)),
        Collective("collective-permute", 1, 64, (0, 2)),
        Collective("all-reduce", 1, 64, (0, 1, 2, 3, 4, 5, 6, 7)),
        Collective("all-reduce", 1, 64),
    )
    assert program.cycles == 6 * 100 + 7 + 30 and program.unknown == 1
    axes = [found.axes((2, 2, 2), ("fsdp", "context", "tensor")) for found in program.collectives]
    assert axes[:2] == [("fsdp", "tensor"), ("fsdp",)]
    whole = ("fsdp", "context", "tensor")
    assert axes[2:] == [("fsdp", "tensor"), ("context",), whole, whole]


@pytest.mark.parametrize("name", ["v5p", "v5p:4", "v9:2x2", "v5p:2x2x1x1", "", "v5p:axb"])
def test_a_topology_that_is_none_is_refused_in_one_line(name):
    with pytest.raises(ValueError, match=r"--topology = .*: must be one of v4, v5e") as caught:
        device_of(name)
    assert "\n" not in str(caught.value)


def call(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.plan", *arguments],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return done.returncode, done.stdout, errors


SMALL = [
    "--config=nano",
    "--topology=v5e:2x2",
    *(
        f"--set={setting}"
        for setting in (
            "model.layers=2", "model.kda_to_full=1:1", "model.vocab_size=256", "mesh.fsdp=2",
            "mesh.context=2", "data.batch_size=4", "data.sequence_length=256",
        )
    ),
]  # fmt: skip


@pytest.mark.full
def test_a_small_model_on_four_devices():
    pytest.importorskip("libtpu")
    code, out, errors = call(*SMALL)
    assert code == 0 and not errors, (out, errors)
    assert "fsdp 2, context 2" in out and "16.00 GiB: fits" in out
    assert "all-gather over fsdp: " in out and "over context: " in out
    assert "compiler's estimate" in out

    code, _, errors = call(*SMALL, "--set=mesh.fsdp=4")
    assert code == 2 and len(errors) == 1 and "needs 8 devices, there are 4" in errors[0]
    code, _, errors = call(*SMALL, "--set=mesh.fsdp=1", "--set=mesh.tensor=3")
    assert code == 2 and len(errors) == 1
