"""Records of what happens inside, against layers walked through one by one, in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import (
    FeedForwardConfig,
    GQAConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ResidualConfig,
    TrainConfig,
)
from k3jax.layers.block import PROBES
from k3jax.layers.documents import documents_of
from k3jax.layers.kda import HALF_LIVES
from k3jax.model import Decoder
from k3jax.params import BalancingState
from k3jax.stacking import by_layer, segments
from k3jax.train.probe_figures import draw
from k3jax.train.probes import (
    discard_after,
    make_probes,
    read_records,
    record_path,
    summarised,
    write_record,
)
from k3jax.train.state import TrainState
from k3jax.train.step import decoder_loss
from tests.layers.rows import relative_rms

VOCAB, MICRO, ROWS, TOKENS = 13, 2, 2, 9
POISON = VOCAB - 1  # a token that stands at padding alone
MODEL = ModelConfig(
    vocab_size=VOCAB,
    d_model=8,
    layers=4,
    kda_to_full="1:1",
    full_attention="gqa",
    gqa=GQAConfig(heads=2, kv_heads=1, head_dim=4),
    mla=MLAConfig(heads=2, kv_lora_rank=6, qk_nope_dim=4, qk_rope_dim=2, value_dim=4),
    kda=KDAConfig(heads=2, key_dim=4, value_dim=3, decay_rank=2, conv_width=2),
    residual=ResidualConfig("attn_res_full"),
    ffn=FeedForwardConfig(dense_width=8),
    moe=MoEConfig(experts=4, top_k=2, expert_width=4, first_k_dense=0, balancing="sign"),
    dtype="float64",
)


def state_of(config, seed):
    """A decoder with every parameter away from its start: graphdef, and a state that has it."""
    graphdef, params, balancing = nnx.split(Decoder(config, rngs=None), nnx.Param, BalancingState)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.5), params)
    table = params["embedding"]
    params["embedding"] = table.replace(table[...].at[POISON].set(1e3))
    balancing = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.1, a.dtype), balancing
    )
    return graphdef, TrainState(params, balancing, None, None, None, None)


def batch_of(rng, poisoned):
    """Packed rows with padding anywhere; the numbers at padding are `poisoned` ones, or not."""
    shape = (MICRO, ROWS, TOKENS)
    ids = np.sort(rng.integers(1, 4, shape), axis=2).astype(np.int32)
    ids[rng.uniform(size=shape) < 0.3] = 0
    ids[1, 1] = 0
    inputs, targets = rng.integers(0, POISON, (2, *shape), dtype=np.int32)
    inputs = np.where(ids > 0, inputs, POISON if poisoned else 0).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": 1.0 * (ids > 0), "segment_ids": ids}


@functools.partial(jax.jit, static_argnums=0)
def run(graphdef, state, x, ids):
    """One sublayer, mixer or feed-forward: its output, and all that it reports."""
    layer = nnx.merge(graphdef, state)
    y, _, stats = layer(x, documents=documents_of(ids), probes=PROBES)
    return y, stats


def walk(graphdef, state, tokens, ids):
    """What each sublayer reads and adds and what it finds, layer by layer, without stacks."""
    model = nnx.merge(graphdef, state.params, state.balancing)
    sources, found = [np.asarray(model.embedding[...])[tokens]], []

    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + MODEL.norm_eps)

    def weights(residual):
        query = np.asarray(residual.gain[...] * residual.query[...])
        p = np.exp([rms(v) @ query for v in sources])
        return p / p.sum(0)

    places = model.blocks[0].layers
    for index in range(MODEL.layers):
        graph, stacked = nnx.split(places[index % len(places)])
        layer = nnx.merge(graph, jax.tree.map(lambda a, i=index: a[i // len(places)], stacked))
        for name in ("mixer", "ffn"):
            p, sublayer = weights(layer.residual[name]), getattr(layer, name)
            h = (p[..., None] * np.stack(sources)).sum(0)
            x = rms(h) * np.asarray(getattr(layer, f"{name}_norm")[...])
            y, stats = run(*nnx.split(sublayer), x, ids)
            it = {"mix": p, "read": h, "added": np.asarray(y), "stats": stats}
            if hasattr(sublayer, "query"):
                q, k = x @ np.asarray(sublayer.query[...]), x @ np.asarray(sublayer.key[...])
                it["logits"] = np.einsum("bqhd,bkd->bhqk", q.reshape(*ids.shape, 2, 4), k) / 2
            if name == "ffn":
                scores = 1 / (1 + np.exp(-(x @ np.asarray(sublayer.router.kernel[...]))))
                it["scores"] = scores + np.asarray(sublayer.router.bias[...])
            found.append(it)
            sources.append(it["added"])
    return found, weights(model.residual)


@pytest.mark.parametrize("ratio", ["0:1", pytest.param("1:1", marks=pytest.mark.full)])
def test_a_record_is_what_the_layers_do(ratio):
    """Each probe at its layer of a stacked model, over micro-batches, whatever is at padding."""
    with jax.enable_x64(True):
        seed = int(np.random.default_rng().integers(1 << 30))
        config = dataclasses.replace(MODEL, kda_to_full=ratio)
        (segment,) = segments(config)
        assert len(segment.pattern) == (2 if ratio == "1:1" else 1)
        graphdef, state = state_of(config, seed)
        probe = make_probes(config, graphdef)
        batch, poisoned = (batch_of(np.random.default_rng(seed), p) for p in (False, True))
        record, again = probe(state, batch), probe(state, poisoned)
        assert record.keys() == again.keys()
        for name, values in record.items():
            np.testing.assert_array_equal(values, again[name], f"{name}, seed {seed}")
        ids, tokens = (batch[k].reshape(-1, TOKENS) for k in ("segment_ids", "inputs"))
        found, head = walk(graphdef, state, tokens, ids)
        real, count, rows = ids > 0, (ids > 0).sum(), (ids > 0).any(1).sum()
        assert rows == MICRO * ROWS - 1

        def same(name, value, *place):
            assert relative_rms(record[name][place], value) < 1e-6, (name, place, seed)

        for at, it in enumerate(found):
            layer, sublayer = divmod(at, 2)
            mix = np.zeros(2 * MODEL.layers + 1)
            mix[: at + 1] = it["mix"][:, real].sum(1) / count
            assert abs(mix.sum() - 1) < 1e-12
            same("mix_weights", mix, layer, sublayer)
            for side, name in (("input", "read"), ("output", "added")):
                square = np.mean(it[name][real] ** 2)
                same(f"{side}_rms", np.sqrt(square), layer, sublayer)
        same("final_mix_weights", head[:, real].sum(1) / count)
        causal = np.tri(TOKENS, dtype=bool)
        seen = (ids[:, :, None] == ids[:, None]) & real[:, :, None] & causal
        for layer, kind in enumerate(config.mixer_kinds()):
            mixer, ffn = found[2 * layer : 2 * layer + 2]
            best = np.argsort(-ffn["scores"][real], axis=1)[:, : MODEL.moe.top_k]
            load = np.bincount(best.ravel(), minlength=MODEL.moe.experts)
            same("expert_load", load / load.mean(), layer)
            assert record["dropped_routes"][layer] == 0
            if kind == "full":
                logits = np.where(seen[:, None], mixer["logits"], -np.inf)
                same("max_logit", logits.max((0, 2, 3)), layer)
                assert ratio == "0:1" or np.isnan(record["state_norm"][layer]).all()
            else:
                stats = {key: np.asarray(stat.value) for key, stat in mixer["stats"].items()}
                same("state_norm", np.sqrt(stats.pop("state_square") / rows), layer)
                assert stats.keys() == {"log_decay", "half_life"}
                for name, total in stats.items():
                    same(name, total / count, layer)
                assert np.isnan(record["max_logit"][layer]).all()


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"full_attention": "mla", "residual": ResidualConfig("attn_res_block", 2, True)},
        {"kda": KDAConfig("gated_delta", 2, 4, 3, 0), "remat": "full", "unroll": True},
        {
            "kda": KDAConfig("delta", 2, 4, 3, 1),
            "residual": ResidualConfig("plain"),
            "moe": dataclasses.replace(MODEL.moe, first_k_dense=2),
        },
        {
            "kda": KDAConfig("linear", 2, 4, 3, 4),
            "residual": ResidualConfig("plain"),
            "moe": MoEConfig(experts=0),
            "kda_to_full": "1:0",
        },
        {"kda_to_full": "0:1", "layers": 3},
    ],
    ids=["kda", "mla blocks", "unrolled", "delta", "linear dense", "attention"],
)
def test_any_model_has_a_record(changes):
    """What a model has is on record, what it lacks is absent; gradients are those of the loss."""
    with jax.enable_x64(True):
        seed = int(np.random.default_rng().integers(1 << 30))
        config = dataclasses.replace(MODEL, **changes)
        graphdef, state = state_of(config, seed)
        batch = batch_of(np.random.default_rng(seed), True)
        record = make_probes(config, graphdef)(state, batch)
        kinds, recurrent = config.mixer_kinds(), "kda" in config.mixer_kinds()
        decays = recurrent and config.kda.rule in ("kda", "gated_delta")
        for name, there in {
            "expert_load": config.moe.experts > 0,
            "log_decay": decays,
            "half_life": decays,
            "state_norm": recurrent,
            "max_logit": "full" in kinds,
            "mix_weights": config.residual.kind != "plain",
            "final_mix_weights": config.residual.kind != "plain",
        }.items():
            assert (name in record) == there, name
            if there and not name.startswith("final"):
                finite = [np.isfinite(row).all() for row in record[name]]
                assert finite == [
                    {"max_logit": kind == "full", "expert_load": config.is_moe(layer)}.get(
                        name, name == "mix_weights" or kind == "kda"
                    )
                    for layer, kind in enumerate(kinds)
                ], name
        if "mix_weights" in record:
            np.testing.assert_allclose(record["mix_weights"].sum(-1), 1, rtol=1e-6)
        if decays:
            np.testing.assert_allclose(np.nansum(record["half_life"], -1)[0], 1, rtol=1e-6)

        loss = decoder_loss(graphdef)
        flat = {name: x.reshape(-1, TOKENS) for name, x in batch.items()}
        grads = jax.jit(jax.grad(lambda p: loss(p, state.balancing, flat)[0]))(state.params)
        norms = {name: np.zeros(config.layers) for name in record["gradient_names"]}
        outer = {}
        for path, variable in nnx.to_flat_state(grads):
            grad = np.asarray(variable[...]) / batch["weights"].sum()
            if path[0] != "blocks":
                outer["/".join(map(str, path))] = np.linalg.norm(grad)
                continue
            segment = segments(config)[path[1]]
            for repeat, part in enumerate(grad):
                layer = segment.first + repeat * len(segment.pattern) + path[3]
                norms["/".join(map(str, path[4:]))][layer] = np.linalg.norm(part)
        want = np.stack(list(norms.values()), axis=1)
        assert relative_rms(np.nan_to_num(record["gradient_norm"]), want) < 1e-6, seed
        assert list(record["outer_gradient_names"]) == list(outer)
        assert relative_rms(record["outer_gradient_norm"], list(outer.values())) < 1e-6, seed


def test_stacked_layers_come_back_by_their_number():
    config = dataclasses.replace(MODEL, layers=7, mixers=(), kda_to_full="2:1")
    kinds, stacked = config.mixer_kinds(), {"head": np.ones(3)}
    for number, segment in enumerate(segments(config)):
        for place, kind in enumerate(segment.pattern):
            at = [segment.layer(repeat, place) for repeat in range(segment.repeats)]
            stacked[f"blocks/{number}/layers/{place}/{kind.mixer}/x"] = np.array(at)[:, None]
    layers, outside = by_layer(config, stacked)
    assert outside.keys() == {"head"} and layers.keys() == {"kda/x", "full/x"}
    for kind in ("kda", "full"):
        want = [index if mixer == kind else np.nan for index, mixer in enumerate(kinds)]
        np.testing.assert_array_equal(layers[f"{kind}/x"][:, 0], want)


def record_of(rng, layers=3):
    """A record as `summarised` makes it, of a model of that many layers with everything in it."""
    config = dataclasses.replace(
        MODEL, layers=layers, mixers=("kda", "full", *["kda"] * (layers - 2))
    )
    bins, sources = len(HALF_LIVES) + 1, 2 * layers + 1
    stats, squares = {"residual/mix_weights": rng.uniform(size=sources)}, {"head": np.ones(())}
    for number, segment in enumerate(segments(config)):
        for place, kind in enumerate(segment.pattern):
            at, n = f"blocks/{number}/layers/{place}", segment.repeats
            stats[f"{at}/ffn/router/load"] = rng.integers(0, 9, (n, 4))
            stats[f"{at}/ffn/dropped_routes"] = np.zeros(n)
            if kind.mixer == "full":
                stats[f"{at}/mixer/max_logit"] = rng.normal(size=(n, 2))
            else:
                stats[f"{at}/mixer/log_decay"] = -rng.uniform(size=(n, 2, 4))
                stats[f"{at}/mixer/half_life"] = rng.integers(0, 9, (n, 2, 4, bins))
                stats[f"{at}/mixer/state_square"] = rng.uniform(size=(n, 2))
            for name in ("mixer", "ffn"):
                stats[f"{at}/residual/{name}/mix_weights"] = rng.uniform(size=(n, sources))
                for side in ("input", "output"):
                    stats[f"{at}/{name}_{side}_square"] = rng.uniform(size=n)
                squares[f"{at}/{name}/kernel"] = rng.uniform(size=n)
    return summarised(config, stats, squares, 5, 2)


def test_records_are_resumed_and_drawn(tmp_path):
    """What lies beyond the step of a checkpoint goes; a damaged file is left out."""
    rng = np.random.default_rng(0)
    for step in (5, 10, 15):
        write_record(record_path(tmp_path, step), record_of(rng))
    discard_after(tmp_path, 10)
    assert [step for step, _ in read_records(tmp_path)] == [5, 10]
    new = record_of(rng)
    write_record(record_path(tmp_path, 15), new)
    record_path(tmp_path, 20).write_bytes(b"PK damaged")
    whole = bytearray(record_path(tmp_path, 15).read_bytes())
    for step, place in ((25, 10), (30, 8)):  # an unknown compression; a flag: encrypted
        damaged = whole.copy()
        damaged[whole.rindex(b"PK\x01\x02") + place] ^= 1
        record_path(tmp_path, step).write_bytes(damaged)
    *_, (step, record) = read_records(tmp_path)
    assert step == 15 and record.keys() == new.keys()
    for name, values in new.items():
        np.testing.assert_array_equal(record[name], values)
    paths = draw(read_records(tmp_path), tmp_path / "probes", "a run")
    assert {path.stem for path in paths} == {
        "expert_load", "kda_decay", "kda_state_norm", "attention_logits", "attn_res_weights",
        "output_rms", "gradient_norm",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert draw([], tmp_path, "nothing") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/probes/00000001\.npz: cannot be written: ") as error:
        write_record(record_path(tmp_path / "file", 1), new)
    assert "\n" not in str(error.value)


def test_a_period_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"train\.probe_every = -1: must not be negative"):
        TrainConfig(probe_every=-1)
