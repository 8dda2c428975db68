"""The GPU's column loop. It is bit-equal to its steps in plain torch, also in Triton's interpreter, and near the result of the
CPU's loop."""

from __future__ import annotations

import warnings

import pytest
import torch

from lowbit.formats import ZeroPoint, parse_scheme
from lowbit.quantize import gptq, rtn
from lowbit.quantize.gptq import _GpuGrid, _Grid, _inside_groups, inverse_factor
from lowbit.quantize.rtn import nearest, scale_dtype, spanning, values
from lowbit.quantize.statistics import output_error
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_triton, loops_to_loaded_bounds
from tests.quantize.data import inputs, weights

pytest.importorskip("triton", reason="the kernels are written in Triton")
from lowbit.quantize.gptq_kernels import ROWS, _format, round_block

SCHEMES = [
    "w4a16_g16", "w4a16_pc", "w3a16_g48_z", "w4a16_g16_fz", "w2a16_g32_z", "w8a16", "w6e3m2a16", "w4e2m1a16_g16", "w5e2m2a16",
    "w8e4m3a16", "w8e5m2a16_g32", "w5e4m0a16_g16", "w4a16_b8x32", "w8e4m3a16_b128x128", "w4a16_t", "w4a16_g100",
]  # fmt: skip


class StepByStep(_GpuGrid):
    """The kernels' steps as single operations of torch, with sums in the order of columns."""

    def round_columns(self, w, factor, groups, cost):
        k, n = w.shape
        codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
        rows = torch.arange(n, device=w.device) // self.rows
        static = [(start, min(start + 128, k)) for start in range(0, k, 128)]
        for start, end in static if cost is None else _inside_groups(k, self.width):
            if cost is not None and start % self.width == 0:
                self.fit(start // self.width, w[start : start + self.width].T, cost[start : start + self.width])
            errors = torch.empty(end - start, n, device=w.device)
            for j in range(start, end):
                scale, zero = (None if t is None else t[rows, groups[j]] for t in (self.scale, self.zero))
                codes[j] = nearest(w[j], scale, zero, self.scheme)
                error = (w[j] - values(codes[j], scale, zero, self.scheme)) / factor[j, j]
                w[j + 1 : end] -= factor[j, j + 1 : end, None] * error
                errors[j - start] = error
            w[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
        return codes

    def _fitted(self, w, cost):
        n = w.shape[0]
        rows = torch.arange(n, device=w.device) // self.rows
        count = int(rows[-1]) + 1
        low, high = w.amin(dim=1), w.amax(dim=1)
        low = torch.stack([low[rows == s].amin() for s in range(count)])
        high = torch.stack([high[rows == s].amax() for s in range(count)])
        scales, zeros = spanning(torch.stack([low, high], dim=1), self.scheme, self.scale.dtype, self._clip_factors[:, None])
        own, offset = scales[:, rows], None if zeros is None else zeros[:, rows]
        total = torch.zeros(len(self._clip_factors), n, device=w.device)
        for j in range(w.shape[1]):
            difference = values(nearest(w[:, j], own, offset, self.scheme), own, offset, self.scheme) - w[:, j]
            total += difference * difference * (cost[j] if self._by_loss else 1)
        total = torch.nn.functional.pad(total, (0, -n % self.rows)).reshape(len(total), -1, self.rows).sum(dim=2)
        best = total.argmin(dim=0)[None]
        return scales.gather(0, best)[0], None if zeros is None else zeros.gather(0, best)[0]


def check(name, n, k, search, static, device="cpu"):
    x, w = inputs(k).to(device), weights(n, k).to(device)
    w[0] = 0
    w[1, ::3] = -0.0  # 8-bit floats keep the sign
    hessian = x.T @ x
    factor = inverse_factor(hessian, 0.05).float()
    cost = factor.diagonal().square().reciprocal()
    scheme, found = parse_scheme(name), []
    for kind in (_GpuGrid, StepByStep):
        grid = kind(w, scheme, search, scale_dtype(scheme, w))
        order = hessian.diagonal().argsort(descending=True, stable=True) if static else torch.arange(k, device=device)
        if static:
            for start in range(0, k, grid.width):
                grid.fit(start // grid.width, w[:, start : start + grid.width], cost[start : start + grid.width])
        codes = grid.round_columns(w[:, order].T.contiguous(), factor, order // grid.width, None if static else cost)
        found.append((codes, grid.scale, grid.zero))
    for got, wanted in zip(*found, strict=True):
        assert (got is None and wanted is None) or torch.equal(got, wanted), (name, n, k, search, static)


CASES = [(name, ("loss", "mse", "max")[i % 3], i % 2 == 1) for i, name in enumerate(SCHEMES)]


def check_without_a_gpu():
    """Checks a scheme of each kind: integers without zeros and with both kinds of zeros, floats with and without mantissa, rows
    that share scales.
    """
    for name, search, static in CASES[0:1] + CASES[2:4] + CASES[6:7] + CASES[11:14]:
        check(name, 19, 36, search, static)
    check("w6e3m2a16", 3, 132, "loss", static=False)


@loops_to_loaded_bounds
def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "search", "static"), CASES)
def test_bit_equal_to_the_steps_on_a_gpu(name, search, static):
    check(name, 37, 300, search, static, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_nothing_waits_for_the_gpu_before_the_last_column(static):
    x, w = inputs(256).cuda(), weights(16, 256).cuda()
    factor = inverse_factor(x.T @ x, 0.05).float()
    cost, groups = factor.diagonal().square().reciprocal(), torch.arange(256, device="cuda") // 16
    grid = _GpuGrid(w, parse_scheme("w4a16_g16"), "loss", torch.float16)
    for i in range(16 * static):
        grid.fit(i, w[:, i * 16 : i * 16 + 16], cost[i * 16 : i * 16 + 16])
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            grid.round_columns(w.T.contiguous(), factor, groups, None if static else cost)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(caught) <= 1, "the check of the scales at the end"


@pytest.mark.gpu
def test_weights_beyond_fp16():
    w = weights(4, 64).cuda() * 2.0**30
    q, small = (gptq(values, torch.eye(64).cuda(), "w4a16_g16") for values in (w, w * 2.0**-30))
    assert q.scale.dtype == torch.bfloat16 and small.scale.dtype == torch.float16
    assert (q.dequantize() - w).norm() <= 1.1 * 2.0**30 * (small.dequantize() - w * 2.0**-30).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_more_rows_than_programs_at_once(static):
    check("w4a16_g64", 5000, 192, "loss", static, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES[::2])
@pytest.mark.parametrize("options", [{}, {"act_order": True}, {"act_order": True, "static_groups": True}], ids=str)
def test_as_good_as_on_the_cpu(name, options):
    """Another order of sums moves a few weights across a tie, but the total loss changes by less than 0.1 %."""
    n, k = 64, 256
    x, w = inputs(k, 2000), weights(n, k)
    hessian = x.T @ x
    mine, again, cpu = (gptq(w.to(d), hessian.to(d), name, **options) for d in ("cuda", "cuda", "cpu"))
    assert torch.equal(mine.codes, again.codes) and torch.equal(mine.scale, again.scale), "the same at every run"
    mine = mine.to("cpu")
    loss, wanted = (float(output_error(q.dequantize() - w, hessian).sum()) for q in (mine, cpu))
    assert abs(loss / wanted - 1) < 1e-3
    assert mine.scheme == cpu.scheme and (
        mine.input_transform.order is None or torch.equal(mine.input_transform.order, cpu.input_transform.order)
    )
    share = float((mine.codes != cpu.codes).float().mean())
    print(f"{name} {options}: {share:.2e} of the codes differ, loss {loss / wanted - 1:+.1e}")
    assert share < 1e-3
    assert loss < float(output_error(rtn(w, name).dequantize() - w, hessian).sum())


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("name", ["w4a16_g128", "w6e3m2a16", "w4a16_g128_fz"])
def test_rows_stay_in_registers(name, sm):
    scheme = parse_scheme(name)
    zero = "*fp16" if scheme.zero is ZeroPoint.FLOAT else None
    numbers = dict.fromkeys(("n", "columns", "factor_stride", "scales_stride", "rows_per_scale"), "i32")
    signature = dict(
        codes="*u8", errors="*fp32", w="*fp32", factor="*fp32", groups="*i64", scales="*fp16", zeros=zero, **numbers
    )
    constants = dict(COLUMNS=128, ROWS=ROWS, **_format(scheme))
    compiled = compile_triton(round_block, signature, constants, ["codes", "errors", "w"], 1, sm, enable_fp_fusion=False)
    assert compiled.stack_bytes == 0 and compiled.registers <= 200
    assert "fma.rn.f32" not in compiled.ptx, "one rounding after the other; divisions are instructions of their own in PTX"


def test_one_block_has_one_group():
    assert _inside_groups(300, 100) == [(0, 100), (100, 200), (200, 300)]
    assert _inside_groups(300, 300) == [(0, 128), (128, 256), (256, 300)]
    assert issubclass(_GpuGrid, _Grid)
