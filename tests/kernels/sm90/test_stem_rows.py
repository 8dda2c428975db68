"""A stem's rows: products read image windows in place; weights and codes are at the addresses of the PTX."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.sm90.stem_pool import ACROSS, COLUMNS, GET, ROW_BYTES, StemRows, put
from lowbit.pack.stem import PIXEL_BYTES, StemImages
from lowbit.pack.stem_fragment import STEP_BYTES
from tests.kernels.parts.plain import check_operands, operands

STRIPS = StageBarriers(40000, 4, 4)


@pytest.mark.parametrize("window", [2, 3, 4])
def test_products_read_each_row_at_its_place(window):
    """In each step, the two output rows read adjacent rows of packed pixels. Adjacent windows are 16 bytes apart."""
    part = StemRows(STRIPS, window, 8192)
    offsets = [16 * int(n) for n in re.findall(r"add.u32 here, at, (\d+);", part.products)]
    wanted = [(step // 2 + down) * ROW_BYTES + step % 2 * STEP_BYTES for step in range(2 * window) for down in (0, 1)]
    assert offsets == wanted and part.products.count(f"m64n{COLUMNS}k32.s32.s8.s8") == 4 * window
    assert max(wanted) + COLUMNS * PIXEL_BYTES + STEP_BYTES <= (window + 1) * ROW_BYTES + PIXEL_BYTES, "inside the strip"
    check_operands(part.products, part.products_constraints)
    check_operands(part.load, part.load_constraints)
    images = StemImages(3, 32, 32, (2 * window - 1,) * 2, (window - 1,) * 2)
    assert images.window[0] == window and part.weights == 16 * 2 * window // 4


def test_copies():
    part = StemRows(STRIPS, 4, 10240)
    assert operands(part.copy) == set(range(8)) and "[bar+40032], $3" in part.copy
    assert f"[bar+40000], {5 * ROW_BYTES};" in part.copy and 5 * ROW_BYTES <= 10240
    assert operands(ACROSS) == {0, 1, 2, 3, 4} and operands(GET) == {0, 1, 2, 3}


@pytest.mark.parametrize(("words", "bits"), [(1, 8), (2, 16)])
def test_codes_of_four_pixels(words, bits):
    text = put(words, range(4, 8), 128)
    assert [int(at) for at in re.findall(r"\[at\+(\d+)\]", text)] == [512, 640, 768, 896]
    assert text.count(f"st.shared.u{bits}") == 4 and operands(text) == set(range(2 + words))
    assert re.findall(r"shr.u32 x, \$(\d), (\d+);", text)[-1] == (("2", "24") if words == 1 else ("3", "16"))
