"""Weights in TensorRT-LLM's lines: from packed bytes through the copies of all threads, ldmatrix and the decoding of lanes to
products, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import QuantTensor, decode, parse_scheme
from lowbit.hardware.emulate import ldmatrix, mma
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.line_stage import LineDecode, LineStage, first_line_piece
from lowbit.pack import InterleavedWeight
from tests.kernels.parts import threads
from tests.kernels.parts.plain import GL, Array, check_operands, plain
from tests.kernels.parts.threads import run

ATOM = MMA_M16N8K16_F16
START = 4096
"""Where shared memory is said to begin."""


class Threads(Array):
    """An element for each thread."""

    def to(self, kind):
        return self


def line_stage(bits=4, row_blocks=4, stages=3, warps=4, group=128, slices=1, subnormal=False):
    return LineStage(LineDecode(f"int{bits}", "fp16", group, "none", "fp16", subnormal), 64, row_blocks, stages, warps, slices)


def weights(n, k, bits, group, seed=0):
    """Random codes with scales that are powers of two: all products are exact."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=g)
    scheme = parse_scheme(f"w{bits}a16_g{group}" if group else {4: "w4a16_pc", 8: "w8a16"}[bits])
    columns = -(-k // group) if group else 1
    scale = torch.exp2(torch.randint(-3, 1, (n, columns), generator=g).float())
    return QuantTensor(codes, scale.half() if group else scale, None, scheme)


def copied(made, plane, first_row_block, iteration, slot, shared, exist=None):
    """Codes of a stage in shared memory, copied as the kernel does."""
    memory, slices = plane.numpy().reshape(-1).view(np.uint8), made.slices
    thread = np.arange(made.threads).view(Threads)
    k = plane.shape[1] * 32 // made.dequantizer.bits // made.columns
    row = 2 * made.dequantizer.bits * k  # bytes of a strip
    of = plain(first_line_piece, STRIP=16, gl=GL)
    source = 4 * (of(0, first_row_block, thread, row // 4, made) + iteration * made.tile_words * slices)
    at = START + made.w_start + slot * made.w_bytes
    call = [at + 16 * thread, source, np.full(made.threads, row), thread, np.full(made.threads, exist or slices)]
    for turn in range(made.code_copies(0)):
        run(made.copy_codes(turn, 0), call, 1, shared, START, memory)
    return at


def executed(text, inputs, outputs):
    """PTX without braces of vectors, its scopes left out: no name stands for two things at once."""
    return run(text.replace("{", "").replace("}", ""), inputs, outputs)


@pytest.mark.parametrize(("row_blocks", "warps", "slices"), [(4, 4, 1), (8, 8, 1), (16, 8, 1), (4, 8, 2)])
@pytest.mark.parametrize("bits", [4, 8])
def test_lanes_read_the_codes_of_their_own_k(bits, row_blocks, warps, slices):
    """A word of a lane is its two elements of B of 16 k, at 4 bits those of two such blocks; of channel g, then of g + 8."""
    made, tiles, slot, iteration, first_row_block = (
        line_stage(bits, row_blocks, warps=warps, slices=slices),
        3 * slices,
        1,
        1,
        2,
    )
    q = weights(16 * (row_blocks + first_row_block), 64 * tiles, bits, 0)
    plane = InterleavedWeight.pack(q).codes
    shared = np.full(made.bytes, 255, dtype=np.uint8)
    at = copied(made, plane, first_row_block, iteration, slot, shared)
    assert made.w_bytes == slices * made.slice_bytes
    outside = np.delete(shared, np.s_[at - START : at - START + made.w_bytes])
    assert (outside == 255).all(), "nothing else is written"
    thread = np.arange(made.threads)
    own, lane = thread // 32 % 2, thread % 32
    check_operands(made.read(2), made.read_constraints)
    for of_slice in range(slices):
        start = np.full(made.threads, at + of_slice * made.slice_bytes)
        found = run(made.read(2), [start, own, lane], len(made.read_types), shared, START)
        words = np.stack(found[:bits], axis=1)  # thread, word
        per_word, first = 32 // bits, 64 * (iteration * slices + of_slice)
        places = [0, 4, 1, 5, 2, 6, 3, 7] if bits == 4 else [0, 2, 1, 3]  # of elements 0, 1, .., from below
        for word in range(bits):
            row = 8 * (word % 2) + lane // 4 + 16 * (first_row_block + own + 2)
            for element in range(per_word):
                block, inside = divmod(element, 4)
                k = first + 8 * per_word // 2 * (word // 2) + 16 * block + 2 * (lane % 4) + inside % 2 + 8 * (inside // 2)
                code = words[:, word] >> np.uint32(bits * places[element]) & np.uint32((1 << bits) - 1)
                assert np.array_equal(code, q.codes.numpy()[row, k]), (word, element)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_bank_is_met_twice(bits, monkeypatch):
    """The 8 rows of a matrix lie in 8 different groups of 4 banks."""
    made, asked = line_stage(bits), []

    def noted(shared, addresses):
        asked.append(addresses)
        return ldmatrix(shared, addresses)

    monkeypatch.setattr(threads, "ldmatrix", noted)
    lane = np.arange(32)
    run(made.read(1), [lane * 0 + START, lane * 0 + 2, lane], len(made.read_types), np.zeros(made.bytes, np.uint8), START)
    assert len(asked) == bits // 4
    for matrix in (matrix for addresses in asked for matrix in addresses):
        assert len(set(matrix % 128 // 16)) == 8


def test_a_later_slice_beyond_k_is_zeros():
    made = line_stage(row_blocks=4, warps=8, slices=2)
    plane = InterleavedWeight.pack(weights(64, 128, 4, 0)).codes
    shared = np.full(made.bytes, 255, dtype=np.uint8)
    at = copied(made, plane, 0, 0, 0, shared, exist=1) - START
    assert shared[at : at + made.slice_bytes].any()
    assert not shared[at + made.slice_bytes : at + made.slice_bytes + 128 * 4 * 4].any()


@pytest.mark.parametrize(("bits", "group"), [(4, 0), (4, 128), (4, 64), (4, 16), (8, 0), (8, 128), (8, 32)])
def test_products(bits, group):
    """Every lane's words, decoded and scaled by the kernel's PTX, as operand A of mma.sync: the product of the weights."""
    n, k, m = 64, 192, 8
    q = weights(n, k, bits, group, seed=bits + group)
    w = InterleavedWeight.pack(q)
    subnormal = w.channel_scale is not None and w.channel_scale.dtype == torch.bfloat16
    assert subnormal == (bits == 4 and group > 0)
    made = line_stage(bits, group=group, subnormal=subnormal)
    d = made.dequantizer
    x = np.random.default_rng(1).integers(-4, 5, (m, k)).astype(np.float16)
    thread = np.arange(made.threads)
    total = np.zeros((made.threads // 32, 32, ATOM.c.registers))
    for tile in range(k // 64):
        shared = np.full(made.bytes, 255, dtype=np.uint8)
        at = copied(made, w.codes, 0, tile, 0, shared)
        if group:
            memory = w.scale.numpy().reshape(-1).view(np.uint8)
            pieces, row = made.scale_pieces, 2 * w.scale[0].numel()
            source = thread // pieces * row + thread % pieces * 16 + tile * 64 // group * (32 * d.group_words)
            call = [at + 16 * thread, source, np.full(made.threads, row), thread, np.ones(made.threads)]
            for turn in range(made.scale_copies):
                run(made.copy_scales(turn), call, 1, shared, START, memory)
        start = np.full(made.threads, at)
        found = run(made.read(0), [start, thread // 32, thread % 32], len(made.read_types), shared, START)
        words, scales = found[:bits], found[bits:]
        ready = []
        for i in range(d.groups):
            ready += executed(d.prepare_asm, scales[i * d.group_words : (i + 1) * d.group_words], d.prepared)
        for turn in range(d.blocks):
            inputs = words[turn * d.block_words : (turn + 1) * d.block_words]
            inputs += ready[d.first_group(turn) * d.prepared : d.end_group(turn) * d.prepared] if group else []
            registers = executed(d.block_asm(turn), inputs, d.block_registers)
            for step in range(d.block_registers // 4):
                first = 64 * tile + 16 * (turn * d.block_registers // 4 + step)
                a = np.stack(registers[4 * step : 4 * step + 4], axis=1).reshape(-1, 32, 4)
                b = np.ascontiguousarray(ATOM.b.gather(x[:, first : first + 16].T)).view(np.uint32)[..., 0]
                for warp in range(len(total)):
                    total[warp] = mma(ATOM, "f16", a[warp], b, total[warp])
    y = np.concatenate([ATOM.c.scatter(sums[..., None]) for sums in total]) * d.epilogue_factor  # [n, m]
    if w.channel_scale is not None:
        y *= w.channel_scale.double().numpy()[:, None]
    np.testing.assert_array_equal(y, q.dequantize(torch.float64).numpy() @ x.astype(np.float64).T)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_registers_are_those_of_fragment_order(bits, dtype):
    """Each of a tile has one output of the conversion, and its arithmetic is that of the other order."""
    for group, subnormal in ((0, False), (64, False), (32, bits == 4)):
        own, other = (kind(f"int{bits}", dtype, group, "none", dtype, subnormal) for kind in (LineDecode, Dequantizer))
        assert own.blocks * own.block_words == bits and own.blocks * own.block_registers == 16
        places = [own.register_of(run, i) for run in range(bits) for i in range(own.conversion.fields.registers)]
        assert sorted(places) == list(range(16))
        for run_, i in ((r, i) for r in range(bits) for i in range(own.conversion.fields.registers)):
            assert own.output_of(own.register_of(run_, i)) == i
        count = [sum(d.block_asm(turn).count(".rn.") for turn in range(d.blocks)) for d in (own, other)]
        assert count[0] == count[1]


def test_what_a_code_is():
    """Lines hold codes with their offset: the conversion of int4 gives the value."""
    assert decode(torch.tensor([[0, 8, 15]], dtype=torch.uint8), parse_scheme("w4a16_pc").weight).tolist() == [[-8, 0, 7]]
