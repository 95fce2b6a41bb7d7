"""How narrow may the experts' space be, at equal active parameters? (K3R §2.3)

    python -m experiments.ablate --study=latent_width --config=nano --workdir=runs/latent_width

alpha is the model's width over the latent one; K3 has 2. With alpha, the widths of the experts
change so that active parameters stay equal. The widths are those of `nano`.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import case, chain, product

_WIDTHS = chain(
    case("alpha 2", "model.moe.latent_width=64"), case("alpha 4", "model.moe.latent_width=32")
)
_NORMS = chain(
    case("norm", "model.moe.latent_norm=true"), case("no norm", "model.moe.latent_norm=false")
)

STUDY = Study(
    question="How narrow may the experts' space be at equal active parameters?",
    axis="latent width",
    points=chain(case("alpha 1", "model.moe.latent_width=0"), product(_WIDTHS, _NORMS)),
    reference="alpha 2, norm",
    equal="active",
)
