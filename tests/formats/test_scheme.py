from __future__ import annotations

import pytest

from lowbit.formats import (
    ALIASES,
    ActivationRule,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    Scheme,
    ZeroPoint,
    float_format,
    int_format,
    parse_scheme,
    uint_format,
)
from tests.formats import FLOAT_FORMATS


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("w8a16", Scheme(int_format(8))),
        ("w6e3m2a16", Scheme(float_format(3, 2))),
        ("wf6af16", Scheme(float_format(3, 2))),
        ("W4A16", Scheme(int_format(4), None, PerGroup(128))),
        ("w4a16_pc", Scheme(int_format(4))),
        ("w4a16_g32_fz", Scheme(uint_format(4), None, PerGroup(32), ZeroPoint.FLOAT)),
        ("w3a16_z", Scheme(uint_format(3), None, PerChannel(), ZeroPoint.INTEGER)),
        ("W8A8", Scheme(int_format(8), int_format(8))),
        ("FP8", Scheme(float_format(4, 3), float_format(4, 3), PerTensor())),
        ("w8e4m3a8e4m3_b128x128", Scheme(float_format(4, 3), float_format(4, 3), PerBlock(128, 128))),
        ("w8a8_az", Scheme(int_format(8), int_format(8), activation_zero=True)),
        ("w8a8_t_az", Scheme(int_format(8), int_format(8), PerTensor(), activation_zero=True)),
        ("w4a8_g64_z_az", Scheme(uint_format(4), int_format(8), PerGroup(64), ZeroPoint.INTEGER, True)),
        ("w8a8_ct", Scheme(int_format(8), int_format(8), rule=ActivationRule.COMPRESSED_TENSORS)),
        ("w8a8_t_az_ct", Scheme(int_format(8), int_format(8), PerTensor(), ZeroPoint.NONE, True, ActivationRule("ct"))),
        (
            "w8e4m3a8e4m3_b128x128_hf",
            Scheme(float_format(4, 3), float_format(4, 3), PerBlock(128, 128), rule=ActivationRule("hf")),
        ),
        ("w8e4m3a8e4m3_fb", Scheme(float_format(4, 3), float_format(4, 3), rule=ActivationRule.FBGEMM)),
        ("w4a8e4m3_g128", Scheme(int_format(4), float_format(4, 3), PerGroup(128))),
    ],
)
def test_names(name, scheme):
    assert parse_scheme(name) == scheme
    assert parse_scheme(scheme.name) == scheme


def test_every_canonical_name_parses_back():
    weights = [int_format(b) for b in range(2, 9)] + FLOAT_FORMATS
    for weight in weights:
        for granularity in (PerTensor(), PerChannel(), PerGroup(64), PerBlock(128, 64)):
            for activation in (None, int_format(8), float_format(4, 3)):
                scheme = Scheme(weight, activation, granularity)
                assert parse_scheme(scheme.name) == scheme
    for bits in range(2, 9):
        for zero in (ZeroPoint.INTEGER, ZeroPoint.FLOAT):
            scheme = Scheme(uint_format(bits), None, PerGroup(32), zero)
            assert parse_scheme(scheme.name) == scheme


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w4a16_g128_ct", "the rule _ct quantizes activations to integers, e4m3 or e2m1, not to 16 bits"),
        ("w8a8_hf", "the rule _hf quantizes activations to e4m3, not to int8"),
        ("w8e4m3a8e5m2_fb", "the rule _fb quantizes activations to e4m3, not to fp8_e5m2"),
    ],
)
def test_rules_that_say_nothing(name, message):
    with pytest.raises(ValueError, match=message):
        parse_scheme(name)
    assert parse_scheme("w8a8_az_ct").weight_only == parse_scheme("w8a16")


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_parse(alias):
    assert parse_scheme(alias.upper()) == parse_scheme(alias)


GRAMMAR = r"unknown scheme '.*'; (did you mean .*|)the grammar is w<bits>.*, for example w4a16_g128, .*; aliases: fp8, "
ACTIVATIONS = "zero points of activations .* go with integer activations of one scale per token or layer, such as w8a8_az"


@pytest.mark.parametrize(
    ("bad", "help"),
    [
        ("w16a16", "leaves the weights in 16 bits"), ("w4", GRAMMAR), ("q4_k_m", GRAMMAR), ("w4a16_g64_fz_z", GRAMMAR),
        ("w6e3m3a16", "1 sign . 3 exponent . 3 mantissa bits are 7, not 6"), ("w4a16_g0", "a group has at least 1 element"),
        ("w6e3m2a16_z", "zero points go with integer weights"), ("w8a16_az", ACTIVATIONS), ("w8e4m3a8e4m3_az", ACTIVATIONS),
        ("w8a8_b128x128_az", ACTIVATIONS),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_help(bad, help):
    with pytest.raises(ValueError, match=help):
        parse_scheme(bad)


def test_unknown_name_teaches_the_grammar():
    with pytest.raises(ValueError, match="w<bits>.*for example w4a16_g128.*wf6af16"):
        parse_scheme("int4-awq")
