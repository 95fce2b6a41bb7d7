"""Does attention over depth beat adding up, and how large should a block be? (AR Table 4)

    python -m experiments.ablate --study=residual --config=mini --workdir=runs/residual

The Attention Residuals report has validation losses of 1.766 (plain), 1.737 (full) and 1.746 for
blocks of 2 to 8 sublayers, drifting to the plain figure for larger ones.

With `--set train.probe_every=200` each run draws, in its `probes` folder, how much every sublayer
reads of each block, and magnitudes and gradients by depth.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import case, chain, product

_BLOCKS = product(
    case("block", "model.residual.kind=attn_res_block"),
    chain(*(case(f"{n} layers", f"model.residual.block_size={n}") for n in (1, 2, 4))),
)

STUDY = Study(
    question="Which residual gives the lowest loss?",
    axis="residual",
    points=chain(
        case("plain", "model.residual.kind=plain"),
        case("full", "model.residual.kind=attn_res_full"),
        _BLOCKS,
    ),
    reference="plain",
)
