"""Packed pages of keys and values, in fragment order. What is written is read again, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.kv import parse_kv, quantize_rows
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.pack.kv_pages import KVPages, kv_refusals, page_bytes, row_places, scale_places

SCHEMES = ("16", "fp8", "int8", "int4", "k8v4", "kint4vfp8")
CPU = torch.device("cpu")


@pytest.mark.parametrize("kv", SCHEMES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_what_is_written_is_read(kv, head_dim):
    generator = torch.Generator().manual_seed(0)
    pages = KVPages.make(parse_kv(kv), 3, 2, head_dim, torch.float32, "cpu")
    assert pages.nbytes == 3 * page_bytes(parse_kv(kv), 2, head_dim, torch.float32) and pages.pages == 3
    k, v = torch.randn(2, 384, 2, head_dim, generator=generator)
    token = torch.randperm(384, generator=generator)
    for some in token.split(100):  # parts of the tokens are written in turn: none may overwrite another's codes
        pages.write(some // 128, some % 128, k[some], v[some])
    found = pages.read(token // 128, token % 128, torch.float32)
    for rows, given, fmt in zip(found, (k, v), (pages.scheme.k, pages.scheme.v), strict=True):
        expected = given[token]
        if fmt.quantized:
            alone = KVPages.make(parse_kv(str(fmt)), 1, 2, head_dim, torch.float32, "cpu")
            for i in (0, 17, 300):
                alone.write(torch.zeros(1).long(), torch.zeros(1).long(), expected[i : i + 1], expected[i : i + 1])
                assert torch.equal(alone.read(torch.zeros(1).long(), torch.zeros(1).long(), torch.float32)[0][0], rows[i])
        assert (rows - expected).norm() <= {16: 0.0, 8: 0.03, 4: 0.13}[fmt.bits] * expected.norm()


@pytest.mark.parametrize("kv", SCHEMES[1:])
def test_a_token_changes_its_own_codes_only(kv):
    pages = KVPages.make(parse_kv(kv), 2, 1, 96, torch.float32, "cpu")
    for t in pages.tensors:
        t.fill_(0x5A if t.dtype == torch.uint8 else 1.0)
    before = pages.clone()
    pages.write(torch.tensor([1]), torch.tensor([77]), torch.randn(1, 1, 96), torch.randn(1, 1, 96))
    others = torch.tensor([i for i in range(256) if i != 128 + 77])
    for after, same in zip(
        pages.read(others // 128, others % 128, torch.float32),
        before.read(others // 128, others % 128, torch.float32),
        strict=True,
    ):
        assert torch.equal(after, same)
    for t, old, fmt in ((pages.k, before.k, pages.scheme.k), (pages.v, before.v, pages.scheme.v)):
        assert (t != old).sum() <= 96 * fmt.bits // 8
    assert (pages.k_scale != before.k_scale).sum() == 1 and pages.k_scale[1, 0, scale_places(torch.tensor(77))] != 1


@pytest.mark.parametrize("values", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_lanes_vectors_are_operand_a(bits, values):
    """Field j of a lane's words has the elements of register j. The two halves of a word are neighbours along the reduction.
    Both are derived from the instruction's table."""
    head_dim, fields = 64, 16 // bits
    places = row_places(bits, head_dim, values, CPU)
    held = torch.full((128 * head_dim * bits // 8, 8 // bits, 2), -1)
    for low, of in enumerate((places.low, places.high)):
        if of is not None:
            for token in range(128):
                held[places.bytes[token], low] = torch.stack((torch.full_like(of, token), of), 1)
    assert (held >= 0).all()
    # block, vector, lane, word, half, field -> (token, element)
    words = held.view(4, -1, 32, 4, 2, fields, 2)
    of_lane = words.permute(0, 2, 1, 3, 4, 5, 6).flatten(2, 3)  # block, lane, word, half, field
    row, column = (torch.from_numpy(x.copy()).view(32, 4, 2) for x in MMA_M16N8K16_F16.a.coordinates())  # lane, register, half
    chunks, per = head_dim // 32, bits // 4
    for octet in range(0, 4, 2):
        for step in range(2 * chunks):
            if bits == 4:
                word, first = [(octet + i) * chunks + step // 2 for i in (0, 1)], 2 * (step % 2)
            else:
                word, first = [(octet + i) * per * chunks + step for i in (0, 1)], 0
            for register in range(4):
                # for keys, rows g and g + 8 are in two octets of tokens; for values, octets are along the reduction
                which, field = (register // 2, register % 2) if values else (register % 2, register // 2)
                got = of_lane[2, :, word[which], :, first + field]  # lane, half -> token, element
                if values:
                    assert torch.equal(got[..., 1], 16 * step + row[:, register])
                    assert torch.equal(got[..., 0], 64 + 8 * octet + column[:, register])
                else:
                    assert torch.equal(got[..., 0], 64 + 8 * octet + row[:, register])
                    # the elements of a lane are neighbours, in the same order as in q
                    t = torch.arange(32)[:, None] % 4
                    assert torch.equal(got[..., 1], 32 * (step // 2) + 8 * t + 4 * (step % 2) + 2 * field + torch.arange(2))


def test_scales_of_a_lane_group_are_neighbours():
    token = torch.arange(128)
    assert sorted(scale_places(token).tolist()) == list(range(128))
    for block in range(4):
        for g in range(8):
            place = scale_places(32 * block + 8 * torch.arange(4) + g)
            assert place.tolist() == [32 * block + 4 * g + r for r in range(4)]


def test_codes_of_many_tokens_are_those_of_rows():
    pages = KVPages.make(parse_kv("int8"), 1, 1, 32, torch.float32, "cpu")
    rows = torch.randn(128, 1, 32)
    pages.write(torch.zeros(128).long(), torch.arange(128), rows, rows)
    codes, scale = quantize_rows(rows, pages.scheme.k)
    places = row_places(8, 32, True, CPU)
    assert torch.equal(pages.v[0, 0][places.bytes], codes[:, 0])
    assert torch.equal(pages.v_scale[0, 0, scale_places(torch.arange(128))], scale[:, 0])


def test_bytes_and_refusals():
    assert page_bytes(parse_kv("16"), 8, 128, torch.float16) == 128 * 8 * 128 * 4
    assert page_bytes(parse_kv("int4"), 8, 128, torch.float16) == 128 * 8 * (128 + 4)
    assert page_bytes(parse_kv("k8v4"), 8, 128, torch.bfloat16) == 128 * 8 * (128 + 64 + 4)
    assert page_bytes(parse_kv("fp8"), 2, 80, torch.float16) == 128 * 2 * (2 * 96 + 4), "padded to 96"
    assert kv_refusals(parse_kv("16"), 100) == () == kv_refusals(parse_kv("int4"), 80)
    assert kv_refusals(parse_kv("int4"), 100) == (
        "packed keys and values have heads of 16 to 256 elements, a multiple of 8, got 100",
    )
