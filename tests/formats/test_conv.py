"""Definitions of convolutions of codes: the table of storages, and specs, which describe everything except the values."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import code_values, number_format
from lowbit.formats.conv import (
    ACTIVATIONS,
    CODES,
    FLOATS,
    STORAGES,
    ConvLayer,
    ConvSpec,
    ProductSpec,
    SecondProduct,
    SumSpec,
    code_range,
    stored_dtype,
    weight_storage,
)
from lowbit.pack.nhwc64 import Nhwc64


def layer(weight, x="u4", y="u4", **more):
    s = torch.ones(weight.shape[0])
    return ConvLayer(weight, s, s, x, y, **more)


@pytest.mark.parametrize(("storage", "name"), [("u4", "uint4"), ("s4", "int4"), ("s8", "int8")])
def test_a_storage_is_a_number_format(storage, name):
    fmt = number_format(name)
    values = code_values(fmt)
    assert CODES[storage] == fmt and code_range(storage) == (int(values.min()), int(values.max()))
    assert stored_dtype(storage) == torch.uint8


def test_storages_of_values():
    assert STORAGES == ("u4", "s8", "f16", "f32") and [stored_dtype(name) for name in FLOATS] == [torch.float16, torch.float32]


@pytest.mark.parametrize("storage", ACTIVATIONS)
def test_packed_codes_take_the_whole_range(storage):
    low, high = code_range(storage)
    codes = torch.arange(low, high + 1).reshape(1, -1, 1, 1)
    assert torch.equal(Nhwc64(storage).unpack(Nhwc64(storage).pack(codes), codes.shape[1]), codes.int())
    for beyond in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"{low}\.\.{high}"):
            Nhwc64(storage).pack(torch.full((1, 1, 1, 1), beyond))


def test_weights_are_not_stored_as_activations():
    with pytest.raises(ValueError, match="u4, s8, got 's4'"):
        Nhwc64("s4")


@pytest.mark.parametrize(("least", "most", "storage"), [(-8, 7, "s4"), (-9, 7, "s8"), (-8, 8, "s8")])
def test_four_bits_hold_what_lies_in_their_range(least, most, storage):
    assert weight_storage(torch.tensor([least, most], dtype=torch.int8)) == storage
    assert weight_storage(torch.empty(0, dtype=torch.int8)) == "s4"


def test_a_spec_is_a_layer_without_its_numbers():
    second = SecondProduct(torch.full((3, 2, 1, 1), 100, dtype=torch.int8), torch.ones(3), "s8", (2, 2))
    conv = layer(torch.ones(3, 5, 3, 3, dtype=torch.int8), "u4", "s8", padding=(1, 1), relu=False, second=second, name="c")
    product = ProductSpec("s8", "s8", 2, (1, 1), (2, 2), (0, 0))
    assert conv.spec == ConvSpec("u4", "s4", 5, (3, 3), (1, 1), (1, 1), 3, "s8", False, None, product)
    assert hash(conv.spec) == hash(layer(2 * conv.weight, "u4", "s8", padding=(1, 1), relu=False, second=second).spec)
    assert conv.spec.products == (conv.spec, product) and conv.spec.taps == 9 and product.taps == 1
    assert str(conv.spec) == "5 > 3 3x3, u4 x s4 + s8 x s8 shortcut > s8"


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "keeps"),
    [((3, 3), 1, 1, True), ((1, 1), 1, 0, True), ((3, 3), 2, 1, False), ((3, 3), 1, 0, False), ((3, 5), 1, 1, False)],
)
def test_windows_that_keep_the_size(kernel, stride, padding, keeps):
    spec = ProductSpec("u4", "s4", 64, kernel, (stride, stride), (padding, padding))
    assert spec.keeps_size == keeps
    if keeps:
        assert spec.output_size(9, 7) == (9, 7)


def test_unknown_storages_are_refused():
    weight = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="one of u4, s8, f16, f32, got 's4'"):
        layer(weight, y="s4")
    with pytest.raises(ValueError, match="one of u4, s8, got 'f32'"):
        layer(weight, x="f32")
    with pytest.raises(ValueError, match="u4 or s8, got s4"):
        SumSpec("s4", "s8", 1.0, 0.0)
