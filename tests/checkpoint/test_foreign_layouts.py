"""Layouts of other tools for all widths and options. Random tensors survive writing and reading. Single elements are where the
tools' descriptions place them, computed here with Python's integers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.checkpoint import CheckpointError, awq, compressed_tensors, gptq
from lowbit.checkpoint.awq import Awq
from lowbit.checkpoint.compressed_tensors import CompressedTensors, WeightArgs, args_for, read_layer, write_layer
from lowbit.checkpoint.foreign import ForeignLayer
from lowbit.checkpoint.fp8 import Fp8
from lowbit.checkpoint.gptq import Gptq
from lowbit.formats import (
    InputTransform,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    QuantTensor,
    Scheme,
    parse_scheme,
    scale_shape,
)
from lowbit.formats.number import FloatFormat
from tests.checkpoint.foreign import same

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def random_layer(scheme, n, k, seed, dtype=torch.float16, order=False):
    """A QuantTensor of a scheme, with random bits."""
    g = torch.Generator().manual_seed(seed)
    scheme = parse_scheme(scheme)
    grid = scale_shape(scheme.granularity, (n, k))
    codes = torch.randint(0, 1 << scheme.weight.bits, (n, k), generator=g, dtype=torch.uint8)
    if isinstance(scheme.weight, FloatFormat) and scheme.weight.special == "nan":
        codes[(codes & 0x7F) == 0x7F] = 0
    zero = None
    if scheme.zero.value:
        zero = torch.randint(0, 1 << scheme.weight.bits, grid, generator=g, dtype=torch.uint8)
    permutation = torch.randperm(k, generator=g).int() if order else None
    if order:  # within a group, GPTQ files keep the channels in ascending order
        size = scheme.granularity.block((n, k))[1]
        permutation = torch.cat([part.sort().values for part in permutation.split(size)])
    return QuantTensor(codes, torch.randn(grid, generator=g).to(dtype), zero, scheme, InputTransform(permutation))


def assert_equal(a, b):
    assert a.scheme == b.scheme and (a.input_transform.order is None) == (b.input_transform.order is None)
    assert same(a.codes, b.codes) and same(a.scale, b.scale)
    assert (a.zero is None and b.zero is None) or same(a.zero, b.zero)
    assert a.input_transform.order is None or same(a.input_transform.order, b.input_transform.order)


def bits_of(words):
    """A row of int32 words, joined little-endian into one integer."""
    return sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))


@settings(max_examples=60)
@given(
    bits=st.sampled_from(gptq.BITS), group=st.sampled_from([-1, 16, 32, 40, 64]), n=st.sampled_from([32, 64]),
    k=st.sampled_from([32, 64, 96]), zeros=st.booleans(), v2=st.booleans(), order=st.booleans(), seed=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_gptq_there_and_back(bits, group, n, k, zeros, v2, order, seed, dtype):
    name = f"w{bits}a16_{'pc' if group == -1 else f'g{group}'}{'_z' if zeros else ''}"
    q = random_layer(name, n, k, seed, dtype, order=order and 0 < group < k)
    schema = Gptq(bits, group, v2, symmetric=not zeros)
    tensors = schema.write(q)
    assert_equal(schema.read(ForeignLayer("a", tensors)), q)
    again = schema.write(schema.read(ForeignLayer("a", tensors)))
    assert all(same(again[suffix], tensors[suffix]) for suffix in tensors)


@pytest.mark.parametrize("bits", gptq.BITS)
@pytest.mark.parametrize("v2", [False, True])
def test_gptq_elements_lie_where_they_should(bits, v2):
    q = random_layer(f"w{bits}a16_g32_z", 32, 96, 1, order=True)
    zero = q.zero.clamp(min=1)  # at least 1, so that no zero borrows: each field of version 1 is the zero minus one
    tensors = Gptq(bits, 32, v2).write(dataclasses.replace(q, zero=zero))
    weight = q.codes[:, torch.argsort(q.input_transform.order.long())]
    mask = (1 << bits) - 1
    for n in (0, 7, 31):
        column = bits_of(tensors["qweight"][:, n].tolist())
        assert [(column >> (bits * k)) & mask for k in range(96)] == weight[n].tolist()
    for g in range(3):
        row = bits_of(tensors["qzeros"][g].tolist())
        assert [((row >> (bits * n)) & mask) + (0 if v2 else 1) for n in range(32)] == zero[:, g].tolist()
    assert tensors["g_idx"].tolist() == [q.input_transform.order.tolist().index(k) // 32 for k in range(96)]
    assert same(tensors["scales"], q.scale.T)


@pytest.mark.parametrize(("bits", "one"), [(2, 0x55555555), (4, 0x11111111), (8, 0x01010101)])
def test_gptq_version_1_borrows_in_whole_words(bits, one):
    """For a zero point of 0, GPTQModel and auto-round subtract 1 from the whole word, so the borrow changes the next field."""
    q = random_layer(f"w{bits}a16_g32_z", 32, 32, 2)
    q.zero[::3] = 0
    v1, v2 = Gptq(bits, 32).write(q)["qzeros"], Gptq(bits, 32, v2=True).write(q)["qzeros"]
    assert [w & 0xFFFFFFFF for w in v1[0].tolist()] == [(w - one) & 0xFFFFFFFF for w in v2[0].tolist()]


def test_gptq_symmetric_words_are_the_known_constants():
    q = random_layer("w4a16_g32", 32, 32, 3)
    assert {w & 0xFFFFFFFF for w in Gptq(4, 32).write(q)["qzeros"].flatten().tolist()} == {0x77777777}
    assert {w & 0xFFFFFFFF for w in Gptq(4, 32, v2=True).write(q)["qzeros"].flatten().tolist()} == {0x88888888}


@settings(max_examples=30)
@given(
    group=st.sampled_from([-1, 8, 32]), n=st.sampled_from([8, 40]), k=st.sampled_from([32, 64]), seed=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_awq_there_and_back(group, n, k, seed, dtype):
    q = random_layer(f"w4a16_{'pc' if group == -1 else f'g{group}'}_z", n, k, seed, dtype)
    assert_equal(Awq(group).read(ForeignLayer("a", Awq(group).write(q))), q)


def test_awq_elements_lie_where_they_should():
    q = random_layer("w4a16_g32_z", 24, 64, 4)
    tensors = Awq(32).write(q)
    assert tensors["qweight"].shape == (64, 3) and tensors["qzeros"].shape == (2, 3)
    for word, column in ((0, 0), (2, 16)):
        for nibble, offset in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            for k in (0, 33):
                assert (int(tensors["qweight"][k, word]) >> (4 * nibble)) & 15 == q.codes[column + offset, k]
            assert (int(tensors["qzeros"][1, word]) >> (4 * nibble)) & 15 == q.zero[column + offset, 1]


GRANULARITIES = (PerTensor(), PerChannel(), PerGroup(16), PerGroup(32))


@settings(max_examples=120)
@given(
    bits=st.integers(1, 8), granularity=st.sampled_from(GRANULARITIES), zeros=st.booleans(), padded=st.booleans(),
    layout=st.sampled_from(["pack-quantized", "int-quantized", "naive-quantized"]), n=st.integers(1, 40),
    blocks=st.integers(1, 4), seed=st.integers(0, 9), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_compressed_tensors_integers_there_and_back(bits, granularity, zeros, padded, layout, n, blocks, seed, dtype):
    packed = layout == "pack-quantized"
    k = 32 * blocks if isinstance(granularity, PerGroup) else 32 * blocks - seed
    zeros = zeros and not (packed and granularity == PerTensor())
    args = WeightArgs(layout, bits, False, granularity, zeros, padded=packed and padded)
    q = random_layer(args.scheme, n, k, seed, dtype)
    if bits == 1:  # uses only the integers that both 1 bit and 2 bits can hold
        codes = (q.codes & 1) + 1
        q = dataclasses.replace(q, codes=codes, zero=None if q.zero is None else (q.zero & 1) + 1)
    tensors = write_layer(q, args)
    # Whether words are padded is known from their width. If both widths are equal, the version decides.
    schema = CompressedTensors((dataclasses.replace(args, padded=False),), new_words=not args.padded)
    layer = ForeignLayer("a", tensors)
    shape, found = schema.fit(layer)
    assert shape == (n, k)
    assert_equal(read_layer(layer, shape, found), q)
    again = write_layer(read_layer(layer, shape, found), found)
    assert all(same(again[suffix], tensors[suffix]) for suffix in tensors)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("padded", [False, True])
def test_compressed_tensors_elements_lie_where_they_should(bits, padded):
    args = WeightArgs("pack-quantized", bits, False, PerGroup(32), True, padded=padded)
    q = random_layer(args.scheme, 12, 64, 5)
    if bits == 1:
        q = dataclasses.replace(q, codes=(q.codes & 1) + 1, zero=(q.zero & 1) + 1)
    tensors = write_layer(q, args)
    per_word, mask = 32 // bits, (1 << bits) - 1
    offset = 1 if bits == 1 else 0

    def elements(words, count):
        if padded:
            return [((words[i // per_word] & 0xFFFFFFFF) >> (bits * (i % per_word))) & mask for i in range(count)]
        stream = bits_of(words)
        return [(stream >> (bits * i)) & mask for i in range(count)]

    assert tensors["weight_packed"].shape[1] == (-(-64 // per_word) if padded else 2 * bits)
    assert elements(tensors["weight_packed"][7].tolist(), 64) == [int(c) - offset for c in q.codes[7]]
    assert elements(tensors["weight_zero_point"][:, 1].tolist(), 12) == [int(z) - offset for z in q.zero[:, 1]]
    assert tensors["weight_shape"].tolist() == [12, 64]


def test_equally_long_words_are_told_apart_by_version():
    """10 codes of 6 bits take 2 words both dense and padded, so only the version tells which layout a file has."""
    args = WeightArgs("pack-quantized", 6, False, PerChannel(), False)
    q = random_layer("w6a16", 4, 10, 6)
    old, new = (write_layer(q, dataclasses.replace(args, padded=padded)) for padded in (True, False))
    assert old["weight_packed"].shape == new["weight_packed"].shape and not same(old["weight_packed"], new["weight_packed"])
    for tensors, version in ((old, "0.17.0"), (new, "0.18.0")):
        config = {"config_groups": {"g": {"weights": {"num_bits": 6, "strategy": "channel"}}}, "format": "pack-quantized"}
        schema = CompressedTensors.from_config(config | {"version": version}, "config.json")
        assert_equal(schema.read(ForeignLayer("a", tensors)), q)
    with pytest.raises(CheckpointError, match="config.json has no `version`"):
        CompressedTensors.from_config(config, "config.json").read(ForeignLayer("a", old))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["w8e4m3a16_t", "w8e4m3a16", "w8e4m3a8e4m3_b16x32_ct", "w8a8_ct", "w8a8_az_ct",
                                  "w4a16_g32_z", "w3a16", "w8a16_t"])  # fmt: skip
def test_compressed_tensors_is_chosen_for_a_scheme(name, dtype):
    q = random_layer(name, 40, 96, 7, dtype)
    args = args_for(q)
    config = CompressedTensors((args,)).config(["lm_head"], {args: ["a"]})
    schema = CompressedTensors.from_config(config, "config.json")
    assert_equal(schema.read(ForeignLayer("a", schema.write(q))), q)
    assert args.layout == ("pack-quantized" if "a16" in name and "e4" not in name else "float-quantized" if "e4" in name
                           else "int-quantized")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"), [("w4e2m1a16_g32", "mxfp4"), ("w6e2m3a16_g32", "mxfp6"), ("w8e4m3a16_g32", "mxfp8")]
)
def test_mx_formats_there_and_back(name, layout):
    q = random_layer(name, 5, 64, 8)
    q = dataclasses.replace(q, scale=torch.randint(0, 255, (5, 2)).sub(127).float().exp2().bfloat16())
    args = args_for(q)
    assert args.layout.startswith(layout)
    tensors = write_layer(q, args)
    assert tensors["weight_scale"].dtype == torch.uint8
    assert_equal(CompressedTensors((args,)).read(ForeignLayer("a", tensors)), q)
    reasons = compressed_tensors.refusals(dataclasses.replace(q, scale=q.scale * 1.5))
    assert any("power-of-two" in reason for reason in reasons)


@pytest.mark.parametrize("exponents", [False, True])
def test_fp8_blocks_there_and_back(exponents):
    q = random_layer("w8e4m3a8e4m3_b128x128_hf", 200, 300, 9, torch.float32)
    if exponents:
        q = dataclasses.replace(q, scale=q.scale.abs().log2().round().exp2().bfloat16())
    schema = Fp8(PerBlock(128, 128), "weight_scale_inv", exponents)
    tensors = schema.write(q)
    assert tensors["weight_scale_inv"].dtype == (torch.float8_e8m0fnu if exponents else torch.float32)
    assert_equal(schema.read(ForeignLayer("a", tensors)), q)
    # Although its name ends in "inv", this scale multiplies.
    one = tensors["weight"].float()[150, 290] * q.scale[1, 2].float()
    assert schema.read(ForeignLayer("a", tensors)).dequantize()[150, 290] == one


@pytest.mark.parametrize(
    ("config", "scale", "scheme"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ("weight_scale", ()), "w8e4m3a8e4m3_t_hf"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("weight_scale_inv", (1,)), "w8e4m3a16_t"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, ("weight_scale", (8, 1)), "w8e4m3a8e4m3_fb"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 900.0}, ("weight_scale", (8, 1)), "w8e4m3a16"),
        ({"quant_method": "fp8", "weight_block_size": [4, 16]}, ("weight_scale_inv", (2, 3)), "w8e4m3a8e4m3_b4x16_hf"),
    ],
)
def test_fp8_configurations(config, scale, scheme):
    weight = torch.randn(8, 40).to(torch.float8_e4m3fn)
    layer = ForeignLayer("a", {"weight": weight, scale[0]: torch.full(scale[1], 0.5)})
    q = Fp8.from_config(config, "config.json").read(layer)
    assert q.scheme == parse_scheme(scheme) and torch.equal(q.dequantize(), weight.float() / 2)


@pytest.mark.parametrize(
    ("refusals", "name", "change", "reason"),
    [
        (gptq.refusals, "w6e3m2a16", {}, "integers"),
        (gptq.refusals, "w5a16_g32", {}, "2, 3, 4, 8 bits"),
        (gptq.refusals, "w4a16_t", {}, "groups or channels"),
        (gptq.refusals, "w8a16", {"scale": torch.ones(32, 1)}, "16 bits, these have 32"),
        (gptq.refusals, "w4a16_g32", {"pre_quant_scale": torch.ones(64)}, "scale of the input"),
        (awq.refusals, "w8a16_g32", {}, "4-bit integers"),
        (awq.refusals, "w4a16_g48", {}, "48 does not divide K 64"),
        (awq.refusals, "w4a16_g32", {"order": torch.arange(64).int()}, "no channel order"),
        (compressed_tensors.refusals, "w5e2m2a16", {}, "e4m3"),
        (compressed_tensors.refusals, "w4a16_b16x16", {}, "not of blocks"),
        (compressed_tensors.refusals, "w4a16_g48", {}, "48 does not divide K 64"),
        (compressed_tensors.refusals, "w4a16_g32", {"order": torch.arange(64).int()}, "no channel order"),
    ],
)
def test_what_files_cannot_hold_is_said(refusals, name, change, reason):
    q = random_layer(name, 32, 64, 0)
    of_x = {"order", "pre_quant_scale", "hadamard"} & set(change)
    q = q.with_input(**change) if of_x else dataclasses.replace(q, **change)
    assert any(reason in row for row in refusals(q)), refusals(q)


def test_floating_zeros_are_refused_by_all():
    scheme: Scheme = parse_scheme("w4a16_g32_fz")
    q = QuantTensor(torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 1).half(), torch.ones(32, 1).half(), scheme)
    for refusals in (gptq.refusals, awq.refusals, compressed_tensors.refusals):
        assert any("floating-point numbers" in reason for reason in refusals(q))
