"""Which rule evens the experts' loads, and at what price in loss? (K3R §2.3.3)

    python -m experiments.ablate --study=balancing --config=mini --workdir=runs/balancing

`expert_load` in `results.csv` is the largest load over the mean, in the layer where it is worst.

With `--set train.probe_every=200` each run draws every expert's load, by layer and over steps, in
its `probes` folder.

Lab note: not run yet beyond a few steps.
"""

from experiments.ablation.study import Study
from experiments.sweep import over

STUDY = Study(
    question="Which rule of balancing gives the lowest loss?",
    axis="balancing",
    points=over("model.moe.balancing", ["none", "sign", "quantile", "histogram"]),
    reference="histogram",
)
