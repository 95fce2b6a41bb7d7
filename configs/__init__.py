"""Named experiments: factories of frozen configs, and a one-dial ladder of sizes.

`CONFIGS` is what `--config=NAME` chooses from; a ladder size reads `k3_ladder_L` for L layers.
"""

from collections.abc import Callable

from configs.kimi import kimi_k3, kimi_linear
from configs.ladder import k3_ladder
from configs.one_billion import k3_1b, kimi_linear_1b
from configs.small import mini, nano
from k3jax.config import ExperimentConfig

LADDER = (8, 12, 16, 20, 24)

CONFIGS: dict[str, Callable[[], ExperimentConfig]] = {
    "nano": nano,
    "mini": mini,
    "kimi_linear_1b": kimi_linear_1b,
    "k3_1b": k3_1b,
    "kimi_linear": kimi_linear,
    "kimi_k3": kimi_k3,
    **{f"k3_ladder_{layers}": (lambda layers=layers: k3_ladder(layers)) for layers in LADDER},
}
