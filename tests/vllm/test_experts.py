"""Tests the experts of a layer in the plug-in, for every rank of tensor and of expert parallelism. None of this needs vLLM."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import nn

from lowbit.checkpoint import CheckpointError, LayerEntry, Manifest, layer_tensors
from lowbit.checkpoint.awq import Awq
from lowbit.checkpoint.fp8 import Fp8
from lowbit.checkpoint.gptq import Gptq
from lowbit.formats import ExpertTensor, parse_scheme, rotate_blocks
from lowbit.formats.split import rows_of
from lowbit.quantize import rtn
from lowbit.vllm.experts import (
    FIRST,
    SECOND,
    ExpertSpec,
    ForeignExperts,
    LocalExperts,
    RoundedExperts,
    StackedExperts,
    StreamNames,
    loaded_experts,
    register_expert_parameters,
)
from lowbit.vllm.sources import OwnCheckpoint, SixteenBits, source_of
from tests.tiny import with_channels

E, H, INNER, TOP = 6, 64, 128, 2
DEVICE = torch.device("cpu")
NAME = "model.layers.3.mlp.experts"
ROWS = {"gate_up": 2 * INNER, "down": H}
COLUMNS = {"gate_up": H, "down": INNER}
SHARDS = {"w1": ("gate_up", slice(0, INNER)), "w3": ("gate_up", slice(INNER, None)), "w2": ("down", slice(None))}


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {role: torch.randn(E, ROWS[role], COLUMNS[role], generator=generator) / COLUMNS[role] ** 0.5 for role in ROWS}


def quantized(scheme, down=None, *, rotated=0, order=False):
    """Returns the quantized matrices of all experts. The input channels of down may be rotated in blocks, or have another
    order."""
    w, made = weights(), {}
    for role, name in (("gate_up", scheme), ("down", down or scheme)):
        block = rotated if role == "down" else 0
        matrices = [rtn(rotate_blocks(each, block) if block else each, name).with_input(hadamard=block) for each in w[role]]
        if order and role == "down":
            first = with_channels(matrices[0], True, None)
            matrices = [with_channels(q, True, None).with_input(order=first.input_transform.order) for q in matrices]
        made[role] = ExpertTensor.stack(matrices, E)
    return made


def spec(rank=0, ranks=1, local=tuple(range(E))):
    return ExpertSpec(E, H, INNER, tuple(local), rank, ranks)


def own(made):
    return StackedExperts(NAME, NAME, LayerEntry.of(made["gate_up"]), LayerEntry.of(made["down"]))


def computed(loading, come, x, experts, factors, expert_map=None):
    """Returns y of a layer whose loaders get these (suffix, tensor, shard, expert), in random order."""
    layer = nn.Module()
    register_expert_parameters(layer, loading)
    come = list(come)
    random.Random(0).shuffle(come)
    for suffix, tensor, shard, expert in come:
        parameter = getattr(layer, ("w2_" if shard == "w2" else "w13_") + suffix)
        found = parameter.weight_loader(parameter, tensor, "its name", shard_id=shard, expert_id=expert, return_success=True)
        assert found == (expert in loading.spec.local or isinstance(loading.source, StackedExperts))
    local = LocalExperts(loaded_experts(layer), "silu", expert_map)
    local.prepare(NAME, torch.float32)
    return local(x, experts, factors)


def stacked_tensors(made):
    """Yields the stacked tensors in the form in which `StreamNames` passes them on."""
    for role, shard in (("gate_up", "w1"), ("down", "w2")):
        for suffix, tensor in layer_tensors(made[role]).items():
            yield suffix, tensor[(None,) * (4 - tensor.dim())], shard, 0


def routed(tokens=7, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=generator)
    experts = torch.stack([torch.randperm(E, generator=generator)[:TOP] for _ in range(tokens)]).int()
    return x, experts, torch.rand(tokens, TOP, generator=generator)


def expected(dense, x, experts, factors):
    """Returns the sum over each token's experts, in float64, of products with dequantized matrices."""
    y = torch.zeros(len(x), H, dtype=torch.float64)
    for token in range(len(x)):
        for e, factor in zip(experts[token].tolist(), factors[token].double(), strict=True):
            gate, up = (dense["gate_up"][e] @ x[token].double()).chunk(2)
            y[token] += factor * (dense["down"][e] @ (nn.functional.silu(gate) * up))
    return y


def dense_of(made):
    return {role: q.dequantize(torch.float64) for role, q in made.items()}


def close(y, wanted, limit=1e-4):
    assert y.shape == wanted.shape and float((y.double() - wanted).norm()) < limit * float(wanted.norm())


SCHEMES = ["w4a16_g32", "w4a16_g128", "w3a16_g32_z", "w6e3m2a16", "w8a16_t", "w4e2m1a16_g32", "w4a16_b32x64_z", "w5a16_g16_fz"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_of_all_ranks_add_up(scheme, ranks):
    """Each rank has 32 channels, so that groups of 128 become groups of 32."""
    made, (x, experts, factors) = quantized(scheme), routed()
    y = torch.zeros(len(x), H)
    for rank in range(ranks):
        loading = own(made).loader(spec(rank, ranks), torch.float32, DEVICE)
        y += computed(loading, stacked_tensors(made), x, experts, factors)
    close(y, expected(dense_of(made), x, experts, factors))


def test_a_rank_has_its_half_of_the_gate_and_its_half_of_up():
    made, half = quantized("w4a16_g32"), INNER // 2
    for rank in range(2):
        loading = own(made).loader(spec(rank, 2), torch.float32, DEVICE)
        for suffix, tensor, shard, expert in stacked_tensors(made):
            loading.take(suffix, tensor, shard, expert)
        parts = loading.finish()
        rows = [(rank * half, rank * half + half), (INNER + rank * half, INNER + rank * half + half)]
        for e in range(E):
            assert torch.equal(parts["gate_up"].expert(e).codes, rows_of(made["gate_up"].expert(e), rows).codes)
            assert torch.equal(parts["down"].expert(e).codes, made["down"].expert(e).codes[:, rank * half : rank * half + half])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schemes", [("w8a8", "w8a8"), ("w8a8", "w4a16_g32"), ("w4a8_g128", "w4a8_g128")])
def test_8_bit_activations(schemes, ranks):
    made, (x, experts, factors) = quantized(*schemes), routed()
    y = torch.zeros(len(x), H)
    for rank in range(ranks):
        loading = own(made).loader(spec(rank, ranks), torch.float32, DEVICE)
        y += computed(loading, stacked_tensors(made), x, experts, factors)
    wanted = expected(dense_of(made), x, experts, factors)
    close(y, wanted, 0.03)
    assert float((y.double() - wanted).norm()) > 1e-4 * float(wanted.norm()), "x was not quantized"


@pytest.mark.parametrize("ranks", [1, 2])
def test_rotated_channels_between_the_products(ranks):
    made, (x, experts, factors) = quantized("w4a16_g32", rotated=64), routed()
    y = torch.zeros(len(x), H)
    for rank in range(ranks):
        loading = own(made).loader(spec(rank, ranks), torch.float32, DEVICE)
        y += computed(loading, stacked_tensors(made), x, experts, factors)
    close(y, expected(dense_of(made), x, experts, factors))


@pytest.mark.parametrize(
    "placed", [((0, 1, 2), (3, 4, 5)), ((0, 2, 4), (1, 3, 5)), ((0, 1), (2, 3), (4, 5)), ((0, 1, 2, 3), (4, 5))]
)
def test_each_rank_has_its_experts(placed):
    """Experts are placed linearly, in turns, or in unequal numbers. A slot with expert -1 adds nothing."""
    made, (x, experts, factors) = quantized("w4a16_g32"), routed()
    experts[2, 1], factors[2, 1] = -1, 5.0
    y = torch.zeros(len(x), H)
    for local in placed:
        numbers = torch.full((E,), -1, dtype=torch.int32)
        numbers[list(local)] = torch.arange(len(local), dtype=torch.int32)
        loading = own(made).loader(spec(local=local), torch.float32, DEVICE)
        y += computed(loading, stacked_tensors(made), x, experts, factors, numbers)
    factors[2, 1], experts[2, 1] = 0.0, 0
    close(y, expected(dense_of(made), x, experts, factors))


def single_tensors(of_expert):
    """Yields the tensors of single experts. `of_expert` returns tensors by suffix, for a shard and the number of an expert."""
    for shard in SHARDS:
        for e in range(E):
            for suffix, tensor in of_expert(shard, e).items():
                yield suffix, tensor, shard, e


@pytest.mark.parametrize(("ranks", "local"), [(1, range(E)), (2, range(E)), (1, (1, 4))])
def test_16_bit_experts_are_rounded_as_lowbit_quantize_does(ranks, local):
    made, w, (x, experts, factors) = quantized("w4a16_g32"), weights(), routed()
    source = RoundedExperts(NAME, parse_scheme("w4a16_g32"))
    numbers = torch.tensor([list(local).index(e) if e in local else -1 for e in range(E)], dtype=torch.int32)
    y = torch.zeros(len(x), H)
    for rank in range(ranks):
        loading = source.loader(spec(rank, ranks, local), torch.float32, DEVICE)
        come = single_tensors(lambda shard, e: {"weight": w[SHARDS[shard][0]][e, SHARDS[shard][1]]})
        y += computed(loading, come, x, experts, factors, None if len(local) == E else numbers)
    absent = ~torch.isin(experts, torch.tensor(list(local), dtype=torch.int32))
    close(y, expected(dense_of(made), x, experts, factors.masked_fill(absent, 0)))


FOREIGN = {
    "gptq": (Gptq.from_config({"bits": 4, "group_size": 32, "desc_act": False, "sym": True}, "config.json"), "w4a16_g32"),
    "awq": (Awq.from_config({"bits": 4, "group_size": 32, "zero_point": True}, "config.json"), "w4a16_g32_z"),
    "fp8": (Fp8.from_config({"activation_scheme": "dynamic"}, "config.json"), "w8e4m3a8e4m3_t"),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "local"), [(1, range(E)), (2, range(E)), (1, (1, 4))])
@pytest.mark.parametrize("tool", FOREIGN)
def test_experts_of_other_tools(tool, ranks, local):
    schema, scheme = FOREIGN[tool]
    w, (x, experts, factors) = weights(), routed()
    parts = {(shard, e): rtn(w[role][e, rows], scheme) for shard, (role, rows) in SHARDS.items() for e in range(E)}
    numbers = torch.tensor([list(local).index(e) if e in local else -1 for e in range(E)], dtype=torch.int32)
    y = torch.zeros(len(x), H)
    for rank in range(ranks):
        loading = ForeignExperts(NAME, schema).loader(spec(rank, ranks, local), torch.float32, DEVICE)
        come = [*single_tensors(lambda shard, e: schema.write(parts[shard, e])), ("bias", torch.zeros(H), "w2", local[0])]
        y += computed(loading, come, x, experts, factors, None if len(local) == E else numbers)
    dense = {
        "gate_up": [torch.cat([parts[s, e].dequantize(torch.float64) for s in ("w1", "w3")]) for e in range(E)],
        "down": [parts["w2", e].dequantize(torch.float64) for e in range(E)],
    }
    absent = ~torch.isin(experts, torch.tensor(list(local), dtype=torch.int32))
    close(y, expected(dense, x, experts, factors.masked_fill(absent, 0)), 1e-4 if tool != "fp8" else 0.1)


def refused(match, loading, come):
    with pytest.raises(CheckpointError, match=match):
        for each in come:
            loading.take(*each)
        loading.finish()


def test_what_does_not_fit_is_named():
    made = quantized("w4a16_g32")

    def loading(**how):
        return own(made).loader(spec(**how), torch.float32, DEVICE)

    come = list(stacked_tensors(made))
    name = re.escape(f"{NAME}.{FIRST}")
    refused(rf"files lack {name}.weight_packed, {name}.weight_scale, .*{SECOND}.weight_packed", loading(), [])
    refused(rf"files lack {name}.weight_scale; copy", loading(), [each for each in come if each[::2] != ("weight_scale", "w1")])
    refused(rf"{name}.weight_packed: loaded twice", loading(), [come[0], come[0]])
    refused(rf"{name}.weight_packed: loaded twice", loading(), [*come, come[0]])
    refused(rf'{name}.weight_order: config.json does not state "order"', loading(), [("weight_order", torch.zeros(H), "w1", 0)])
    refused(
        rf"{name}.weight_packed: config.json states torch.uint8 \(6, 256, 32\), the file has torch.uint8 \(5, 256, 32\)",
        loading(), [("weight_packed", come[0][1][:, 1:], "w1", 0)],
    )  # fmt: skip
    refused(
        rf"{SECOND}: cannot be split for rank 0 of 3: 128 channels cannot be split into parts of 42", loading(ranks=3), come[2:]
    )
    with pytest.raises(CheckpointError, match=r"has 6 experts \[256, 64\], vLLM's layer 8 experts \[256, 64\]; config.json"):
        own(made).loader(ExpertSpec(8, H, INNER, tuple(range(8))), torch.float32, DEVICE)
    made = quantized("w4a16_g32", order=True)
    refused(r"down_proj: cannot be split .* order of their own \(act-order\), .*--enable-expert-parallel", loading(ranks=2),
            stacked_tensors(made))  # fmt: skip
    made = quantized("w4a16_g32", rotated=64)
    refused("down_proj: cannot be split .* rotated in blocks of 64 channels", loading(ranks=4), stacked_tensors(made))


def test_single_experts_that_do_not_fit_are_named():
    w, (schema, scheme) = weights(), FOREIGN["gptq"]
    rounded = RoundedExperts(NAME, parse_scheme("w4a16_g32"))
    other = ForeignExperts(NAME, schema)
    come = list(single_tensors(lambda shard, e: {"weight": w[SHARDS[shard][0]][e, SHARDS[shard][1]]}))

    def loading(source):
        return source.loader(spec(), torch.float32, DEVICE)

    def without(come, shard, e):
        return [each for each in come if each[3] != e or each[2] not in shard]

    refused(
        r"files lack model.layers.3.mlp.experts.2.w3.weight; copy", loading(rounded), [c for c in come if c[2:] != ("w3", 2)]
    )
    refused(r"experts.0.w1.weight: loaded twice", loading(rounded), [*come, come[0]])
    refused(r"experts.0.w2.weight: has the shape \[64, 32\]", loading(rounded), [("weight", w["down"][0, :, :32], "w2", 0)])
    refused(
        r"experts.0.w2.bias: vLLM's model has no biases",
        loading(other),
        [("bias", torch.ones(H), "w2", 0)],
    )
    refused(r"its experts are in 16 bits, .* without --quantization lowbit", loading(other), come)
    foreign = list(single_tensors(lambda shard, e: schema.write(rtn(w[SHARDS[shard][0]][e, SHARDS[shard][1]], scheme))))
    refused(r"6 experts, but no file has the up matrix of expert 2", loading(other), without(foreign, ["w3"], 2))
    refused(r"files lack model.layers.3.mlp.experts.5.w1", loading(other), without(foreign, SHARDS, 5))
    with pytest.raises(CheckpointError, match=r"only the files show how experts of this checkpoint are quantized"):
        loading(other).finish(random=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_nothing_but_their_shape(ranks):
    """With vLLM's load format "dummy", experts get random weights of the right shape."""
    x, experts, factors = routed()
    for source in (own(quantized("w4a16_g32")), RoundedExperts(NAME, parse_scheme("w6e3m2a16"))):
        made = source.loader(spec(ranks - 1, ranks), torch.float32, DEVICE).finish(random=True)
        local = LocalExperts(made, "gelu_tanh")
        local.prepare(NAME, torch.float32)
        assert bool(local(x, experts, factors).isfinite().all())


def test_batch_invariance_is_refused_on_a_cpu():
    local = LocalExperts(quantized("w4a16_g32"), "silu")
    with pytest.raises(ValueError, match=rf"{NAME}: gate_up_proj is on a CPU.*; serve it without VLLM_BATCH_INVARIANT"):
        local.prepare(NAME, torch.float32, batch_invariant=True)


def manifest(*modules, matrices=(FIRST, SECOND)):
    scheme = parse_scheme("w4a16_g32")
    shapes = {FIRST: (2 * INNER, H), SECOND: (H, INNER)}
    layers = {f"{module}.{name}": LayerEntry(shapes[name], scheme, experts=E) for module in modules for name in matrices}
    return Manifest(scheme, layers).to_dict()


def test_a_checkpoint_of_ours_says_which_experts_are_quantized():
    modules = [f"model.layers.{layer}.mlp.experts" for layer in range(11)]
    source = source_of(manifest(*modules))
    assert isinstance(source, OwnCheckpoint)
    for layer in (0, 1, 10):
        found = source.experts(modules[layer])
        assert isinstance(found, StackedExperts) and found.in_files == found.name == modules[layer]
        renamed = source.experts(f"model.layers.{layer}.block_sparse_moe.experts")
        assert renamed.in_files == modules[layer] and renamed.name == f"model.layers.{layer}.block_sparse_moe.experts"
    assert source.experts("model.layers.11.mlp.experts") is None
    moved = source.renamed(lambda names: {name: f"language_model.{name}" for name in names})
    found = moved.experts("language_model.model.layers.3.mlp.experts")
    assert found.in_files == modules[3] and found.name == "language_model.model.layers.3.mlp.experts"
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj and down_proj of its experts are both quantized, or both in 16 bits"
    ):
        source_of(manifest(NAME, matrices=(SECOND,))).experts(NAME)
    single = Manifest(parse_scheme("w8a16"), {f"{NAME}.7.up_proj": LayerEntry((64, 64), parse_scheme("w8a16"))}).to_dict()
    with pytest.raises(CheckpointError, match=r"experts.7.up_proj: single experts of a lowbit checkpoint are not supported"):
        source_of(single).experts(NAME)


def test_16_bit_experts_stay_where_that_is_said():
    assert SixteenBits(parse_scheme("w8a16")).experts(NAME) == RoundedExperts(NAME, parse_scheme("w8a16"))
    assert SixteenBits(parse_scheme("w8a16"), ("*.experts",)).experts(NAME) is None
    gptq = source_of({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}).experts(NAME)
    assert isinstance(gptq, ForeignExperts)


def test_names_under_which_vllms_models_load_stacked_experts():
    """Tensors have four dimensions, since vLLM would split a tensor of three dimensions."""
    source = source_of(manifest("model.layers.0.mlp.experts"))
    names = StreamNames([(source.experts("model.layers.0.block_sparse_moe.experts"), ("w1", "w2"))])
    packed, order = torch.zeros(E, 4, 3), torch.zeros(7)
    name, tensor = names.renamed("model.layers.0.mlp.experts.gate_up_proj.weight_packed", packed)
    assert name == "model.layers.0.block_sparse_moe.experts.0.w1.weight_packed" and tensor.shape == (1, E, 4, 3)
    name, tensor = names.renamed("model.layers.0.mlp.experts.down_proj.weight_order", order)
    assert name == "model.layers.0.block_sparse_moe.experts.0.w2.weight_order" and tensor.shape == (1, 1, 1, 7)
    assert names.renamed("model.layers.0.mlp.gate.weight", order) == ("model.layers.0.block_sparse_moe.gate.weight", order)
    assert (
        names.renamed("model.layers.0.self_attn.q_proj.weight_packed", order)[0]
        == "model.layers.0.self_attn.q_proj.weight_packed"
    )
    same = StreamNames([(source.experts("model.layers.0.mlp.experts"), ("gate_proj", "down_proj"))])
    assert same.renamed("model.layers.0.mlp.experts.gate_up_proj.weight_scale", packed)[0] == (
        "model.layers.0.mlp.experts.0.gate_proj.weight_scale"
    )
    assert same.renamed("model.layers.0.mlp.gate.weight", order)[0] == "model.layers.0.mlp.gate.weight"
    assert not StreamNames([(RoundedExperts(NAME, parse_scheme("w8a16")), ("w1", "w2"))])
