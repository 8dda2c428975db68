"""The scaled epilogue against the reference, and the dtypes of y that schemes have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.scaled_epilogue import CODE_TYPES, OUTPUTS, TYPES, function_of, halves, of_channels, of_tokens
from lowbit.kernels.reference.activations import CODE_DTYPES
from lowbit.kernels.reference.gemm import FUNCTIONS
from tests.kernels.parts.plain import GL, plain


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
def test_functions_are_those_of_the_reference(function):
    y = torch.cat([torch.linspace(-12, 12, 4001, dtype=torch.float64), torch.tensor([float("nan"), float("inf")])])
    made = plain(function_of, gl=SimpleNamespace(where=torch.where, exp=torch.exp))(y, SimpleNamespace(function=function))
    torch.testing.assert_close(made, FUNCTIONS[function](y), rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_tile_falls_into_its_halves():
    acc = torch.arange(64 * 32).reshape(64, 32).numpy()
    low, high = plain(halves, gl=GL)(acc, SimpleNamespace(rows=64, store_columns=16, store_layout=None))
    assert (low == acc[:, :16]).all() and (high == acc[:, 16:]).all()


def test_values_of_tokens_and_channels_meet():
    tokens, channels = torch.arange(4.0), torch.arange(3.0)
    for rows in (False, True):
        config = SimpleNamespace(tokens_are_rows=rows)
        both = plain(of_tokens)(tokens, config) * 10 + plain(of_channels)(channels, config)
        assert both.shape == ((4, 3) if rows else (3, 4)) and both.flatten()[-1] == 32


def test_types_are_those_of_codes():
    assert CODE_TYPES == CODE_DTYPES and set(TYPES) == set(CODE_TYPES.values())
    assert {torch.float16, torch.bfloat16, torch.float32, torch.int8} == set(OUTPUTS)
