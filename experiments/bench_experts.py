"""What a call of the grouped matmul costs on a GPU, with peers beside it, and what routing costs.

    python -m experiments.bench_experts --json=out.json
    python -m experiments.bench_experts --product=65536,3584,3072,112 --spread=zipf --routing=False

Every row is checked first, output and gradients, against float32 at full precision. Peers are
measured where they are installed: jla (jax-linear-attention), tokamax, and the example kernels that
come with jax. Prints Markdown. Bad input ends in one line and exit code 2.
"""

from __future__ import annotations

import concurrent.futures
import json

from absl import flags

from experiments.bench import experts
from experiments.options import json_file, measurements, repeats, write_json
from experiments.program import launch
from pallas_kernels import dispatch

PRODUCTS = flags.DEFINE_multi_string(
    "product",
    ["131072,2048,1024,64", "131072,2304,1024,256", "65536,3584,3072,112"],
    "N,K,M,G: rows, K -> M, groups; may repeat.",
)
SPREADS = flags.DEFINE_list("spread", list(experts.SPREADS), "even; zipf.")
WHO = flags.DEFINE_list(
    "who", ["mosaic_gpu", "triton", *experts.PEERS], "Implementations and peers."
)
ROUTING = flags.DEFINE_bool("routing", True, "Also 65,536 tokens to 16 of 896 experts.")
repeats()  # each of a group of eight calls
json_file()


def calls() -> list[experts.Call]:
    """The calls that the flags describe."""
    unknown = set(SPREADS.value) - set(experts.SPREADS)
    if unknown or not SPREADS.value:
        raise ValueError(f"--spread = {','.join(SPREADS.value)}: must be of even, zipf")
    return [
        experts.Call(*_shape(text), spread) for text in PRODUCTS.value for spread in SPREADS.value
    ]


def _shape(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(f"--product = {text!r}: must be N,K,M,G, such as 65536,3584,3072,112")
    return [int(part) for part in parts]


def run() -> int:
    names = (*dispatch.names("grouped_matmul"), *experts.PEERS)
    for who in WHO.value:
        if who not in names:
            raise ValueError(f"--who = {who!r}: must be one of {', '.join(names)}")
    times = measurements()
    found: dict = {"rows": []}

    todo = calls()
    # Compilers run side by side; the sizes of groups are no part of a program.
    keys = dict.fromkeys((who, call.shape) for call in todo for who in WHO.value)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = dict(zip(keys, pool.map(lambda key: experts.compiled(*key), keys), strict=True))
    for call in todo:
        for who in WHO.value:
            program = programs[who, call.shape]
            found["rows"].append(experts.measure(who, call, program, times))
            print(experts.table(found["rows"][-1:]).splitlines()[-1], flush=True)
            write_json(found)
    if ROUTING.value:
        found["routing"] = experts.measure_routing(experts.Routing(), WHO.value[0], times)
        write_json(found)
    print("\n" + experts.table(found["rows"]))
    if ROUTING.value:
        print(f"\nrouting: {json.dumps(found['routing'])}")
    return 0


if __name__ == "__main__":
    launch(run)
