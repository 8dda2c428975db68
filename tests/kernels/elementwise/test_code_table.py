"""Tables of codes, and gates. Codes equal the reference; without a GPU the kernels run in Triton's interpreter. Wrong tensors
are refused."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.conv import GateSpec, code_range
from lowbit.kernels.reference.conv import gate_reference, map_reference
from lowbit.ops.code_table import gate_codes, map_codes
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_triton

pytest.importorskip("triton", reason="the kernels are Triton's")
from lowbit.kernels.elementwise.code_table import (
    GATE_BLOCK,
    MAP_BLOCK,
    gate_kernel,
    map_kernel,
    map_to_codes,
    multiply_by_gate,
)


def check(on="cpu"):
    torch.manual_seed(0)
    table = torch.randint(-128, 128, (256,), dtype=torch.int8, device=on)
    for channels, size in ((70, (3, 5)), (64, (1, 1)), (200, (7, 3))):
        for storage in ("s8", "u4"):
            low, high = code_range(storage)
            codes = torch.randint(low, high + 1, (3, channels, *size), dtype=torch.int32, device=on)
            x = Nhwc64(storage).pack(codes).contiguous()
            shape = Nhwc64("s8").shape(tuple(codes.shape))
            padded = torch.nn.functional.pad(codes, (0, 0, 0, 0, 0, -channels % 64))
            if storage == "s8":
                out = torch.full(shape, 0xA5, dtype=torch.uint8, device=on)
                map_to_codes(x, table, channels, out)
                got = Nhwc64("s8").unpack(out, padded.shape[1])
                assert torch.equal(got[:, :channels], map_reference(codes, table)) and not bool(got[:, channels:].any())
            gate = torch.randint(-128, 128, (3, padded.shape[1], 1, 1), dtype=torch.int32, device=on)
            layer, out = (
                GateSpec(storage, 0.0123 if storage == "s8" else 0.1),
                torch.full(shape, 0xA5, dtype=torch.uint8, device=on),
            )
            multiply_by_gate(x, Nhwc64("s8").pack(gate), layer, out)
            wanted = gate_reference(padded, gate, layer)
            assert torch.equal(Nhwc64("s8").unpack(out, padded.shape[1]), wanted) and wanted.unique().numel() > 100


def test_the_codes_in_tritons_interpreter():
    interpreted(check)


@pytest.mark.gpu
def test_the_codes_on_a_gpu():
    check("cuda")


def test_wrong_tensors_are_refused():
    x, table = torch.zeros(2, 3, 4, 64, dtype=torch.uint8), torch.zeros(256, dtype=torch.int8)
    gate, layer = torch.zeros(2, 1, 1, 64, dtype=torch.uint8), GateSpec("s8", 1.0)
    with pytest.raises(ValueError, match=r"x is contiguous uint8 \[2, 3, 4, 128\] on cpu, got torch.uint8 \[2, 3, 4, 64\]"):
        map_codes(x, table, 65, x.clone())
    with pytest.raises(ValueError, match=r"the table is int8 \[256\] on cpu"):
        map_codes(x, table[1:], 64, x.clone())
    with pytest.raises(ValueError, match=r"the gate is contiguous uint8 \[2, 1, 1, 64\]"):
        gate_codes(x, gate[:1], layer, x.clone())
    with pytest.raises(ValueError, match="gates multiply codes, u4 or s8, got f16"):
        GateSpec("f16", 1.0)


@pytest.mark.parametrize("capability", [80, 90])
def test_codes_move_16_bytes_at_a_time(capability):
    # sizes must be specialised, so that a launch may assume that they are aligned, as this test does
    for kernel in (map_kernel, gate_kernel):
        assert not next(p for p in kernel.params if p.name == "total").do_not_specialize
    signature = {"y": "*i8", "x": "*i8", "table": "*i8", "channels": "i32", "total": "i32"}
    constants = dict(PIXEL=192, BLOCK=MAP_BLOCK)
    kernel = compile_triton(map_kernel, signature, constants, ("y", "x", "table", "total"), 4, capability)
    assert kernel.stack_bytes == 0 and kernel.count("LDG.E.128") == 1 and kernel.count("STG.E.128") == 1
    assert kernel.count("LDG.E.S8") + kernel.count("LDG.E.U8") == 16, "one byte of the table for each code"
    signature = {"y": "*u8", "x": "*u8", "gate": "*u8", "s": "fp32", "pixels": "i32", "total": "i32"}
    constants = dict(PAIRS=96, FOUR=False, BLOCK=GATE_BLOCK)
    kernel = compile_triton(gate_kernel, signature, constants, ("y", "x", "gate", "total"), 4, capability)
    assert kernel.stack_bytes == 0 and kernel.count("LDG.E.128") == 1 and kernel.count("STG.E.128") == 1
