"""Gate and up as one GEMM with the gate in its epilogue, compared with float64 on a GPU. Also tests refusals."""

from __future__ import annotations

import pytest
import torch

from lowbit.kernels.reference.elementwise import gate_reference
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops.gated_gemm import gated_gemm
from lowbit.pack import FragmentWeight
from tests.ops.test_fused_gemm import quantized, relative_error

gpu = pytest.mark.gpu


def gated_by(y, gate):
    """f(gate) * up for y [M, N] float64, whose columns alternate between 8 of gate and 8 of up."""
    first, second = (part.flatten(1) for part in y.unflatten(1, (-1, 2, 8)).unbind(2))
    return gate_reference(first, second, gate)


@gpu
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("w4a16_g128", torch.float16), ("w6e3m2a16", torch.bfloat16), ("w4a16_g128_z", torch.bfloat16)],
    ids=str,
)
def test_against_float64(scheme, dtype, gate):
    """Batches of one tile, several tiles and a partial tile. Outputs are poisoned, and two runs give equal bits."""
    for place, (n, k) in enumerate([(1024, 512), (2832, 1096), (4096, 4096)]):
        w = FragmentWeight.pack(q := quantized(scheme, n, k, "cuda", place))
        bias = torch.randn(n, device="cuda", dtype=dtype) if place % 2 else None
        for m in (1, 16, 17, 64, 65, 100, 128, 200, 300, 1000):
            x = torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(m)).to(dtype)
            torch.full((m, n // 2), float("nan"), dtype=dtype, device="cuda")  # poisons memory to be reused
            y = gated_gemm(x, w, bias, gate)
            wide = mixed_gemm_reference(x, q) + (0 if bias is None else bias.double())
            expected, honest = gated_by(wide, gate), gated_by(wide.to(dtype).double(), gate).to(dtype)
            assert y.shape == (m, n // 2) and y.dtype == dtype
            assert relative_error(y, expected) <= 2 * relative_error(honest, expected) + 2e-4, (n, k, m)
            assert torch.equal(y, gated_gemm(x, w, bias, gate))


@gpu
def test_rows_do_not_depend_on_the_batch_where_they_must_not():
    w = FragmentWeight.pack(quantized("w4a16_g128", 1024, 512, "cuda"))
    x = torch.randn(300, 512, device="cuda", dtype=torch.float16)
    whole = gated_gemm(x, w, None, "silu", batch_invariant=True)
    for m in (1, 16, 40, 129):
        assert torch.equal(gated_gemm(x[:m], w, None, "silu", batch_invariant=True), whole[:m])


def on_meta(w):
    return FragmentWeight(w.codes.to("meta"), w.scale.to("meta"), w.channel_scale, w.scheme, w.shape, w.subnormal)


def test_without_data():
    w = on_meta(FragmentWeight.pack(quantized("w4a16_g64", 96, 128)))
    x = torch.empty(5, 128, dtype=torch.float16, device="meta")
    made = gated_gemm(x, w, None, "silu")
    assert made.shape == (5, 48) and made.dtype == torch.float16
    with pytest.raises(ValueError, match=r"gated silu, gelu_tanh, relu, .* got x \(5, 128\), none, N 96"):
        gated_gemm(x, w, None, "none")
    with pytest.raises(ValueError, match=r"x is \[M, K\]"):
        gated_gemm(x[None], w, None, "silu")
    with pytest.raises(ValueError, match="another K, another scheme"):
        gated_gemm(x[:, :64], w, None, "silu")
    odd = on_meta(FragmentWeight.pack(quantized("w4a16_g64", 88, 128)))
    with pytest.raises(ValueError, match="8 gates and 8 ups"):
        gated_gemm(x, odd, None, "silu")
