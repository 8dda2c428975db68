"""The convolution kernel for many channels: machine code without a GPU, and codes bit-equal to the reference on one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")


from lowbit.formats.conv import CODES, ConvLayer, SecondProduct
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.conv import choose_conv, deep_refusals, deep_tile, steps_of
from lowbit.kernels.reference.conv import conv_reference
from lowbit.kernels.sm90.conv_deep import PreparedDeep, deep_config, deep_conv
from lowbit.pack.conv_weight import WgmmaTiles
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.sass import TRITON, batches, compile_kernel
from tests.kernels.sm90.test_compile import check_straight_line
from tests.kernels.sm90.test_conv import OPERAND, check_products_in_flight, codes_of, layer, product_loops

WIDE = (3, 1)
TILES = [WIDE, (1, 1), (1, 2)]
"""(math warpgroups, blocks per SM)."""

SIZES = ["pixels", "row_units", "out_height", "out_width", "tiles_across", "tiles_down"]


def plain_layer(c, o, kernel=3, stride=1, x="u4", y="u4", second=None, residual=None):
    weight, s = torch.zeros(o, c, kernel, kernel, dtype=torch.int8), torch.zeros(o)
    return ConvLayer(
        weight, s, s, x, y, (stride, stride), (kernel // 2, kernel // 2), True, residual, 0.0, second
    )  # fmt: skip


def compiled(config):
    second = "*i8" if config.second else None
    signature = {"y": "*i32", "residual": "*i32" if config.residual else None, "s": "*fp32", "b": "*fp32", "g": "fp32"}
    signature |= {"s2": "*fp32" if config.second else None} | dict.fromkeys(SIZES, "i32")
    signature |= {name: "*i8" if name in ("maps", "weight") else "i32" for name in OPERAND}
    signature |= {f"{name}2": second if name in ("maps", "weight") else "i32" for name in OPERAND}
    pointers = [name for name in ("y", "residual", "maps", "weight", "s", "b", "s2", "maps2", "weight2") if signature[name]]
    return compile_kernel(deep_conv, signature, config, pointers, config.warps, 90, maxnreg=128)


def check_turns(code):
    """Asserts that nothing writes operand A of a product in flight, from the start through two iterations to the wait after the
    loop.
    """
    lines = [line.replace("IGMMA", "HGMMA") for line in code.lines]
    ((first, last),) = product_loops(code)
    end = min(i for i, line in enumerate(lines) if i > last and "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line)
    check_straight_line(lines[:first] + 2 * lines[first : last + 1] + lines[last + 1 : end + 1])


def check_roles(code):
    """Asserts that the only barrier of all warps is the one before the roles diverge."""
    assert sum("BAR.SYNC" in line for line in code.lines) == 1


WINDOWS = [(3, 1, None), (1, 1, "same"), (1, 1, None), (3, 2, None)]


@pytest.mark.parametrize(
    "cases",
    # Small tiles differ only in the number of warpgroups, so they run with the two most different windows, each with one
    # storage of x.
    batches(
        [(x, WIDE, *window) for x in ("u4", "s8") for window in WINDOWS]
        + [("u4", (1, 1), *WINDOWS[0]), ("s8", (1, 1), *WINDOWS[1]), ("s8", (1, 2), *WINDOWS[0]), ("u4", (1, 2), *WINDOWS[1])]
    ),
)
def test_machine_code(cases):
    made = []
    for x, tile, kernel, stride, residual in cases:
        spec = plain_layer(128, 128, kernel, stride, x, x, residual=x if residual else None).spec
        config = deep_config(spec, deep_tile(spec, *tile), 28)
        made.append((x, stride, config, compiled(config)))
    for each in made:
        check_machine_code(*each)


def check_machine_code(x, stride, config, code):
    # 128 registers at launch, then setmaxnreg moves registers between warpgroups.
    assert code.registers == 128 and code.count("USETMAXREG") == 2 and code.stack_bytes == 0
    steps = 2 + config.odd  # two per iteration, and an odd one before the loop
    assert code.count("IGMMA") == 4 * steps and code.count("WARPGROUP.DEPBAR") == 1 + steps, "not serialized"
    assert code.count("LDSM") == 4 * CODES[x].bits // 8 * steps
    assert ("UTMALDG.2D" in code.opcodes) == (stride == 1) and ("UTMALDG.4D.IM2COL" in code.opcodes) == (stride == 2)
    check_roles(code)
    check_turns(code)


@pytest.mark.parametrize("x", ["u4", "s8"])
def test_two_products(x):
    second = SecondProduct(torch.zeros(128, 256, 1, 1, dtype=torch.int8), torch.zeros(128), x, (2, 2))
    spec = plain_layer(128, 128, 1, 1, x, x, second).spec
    config = deep_config(spec, deep_tile(spec, *WIDE), 28)
    code = compiled(config)
    loops = product_loops(code)
    assert code.registers == 128 and code.stack_bytes <= (48 if TRITON >= (3, 9) else 16)
    assert len(loops) == 2 and code.count("WARPGROUP.DEPBAR") == 2, "not serialized"
    assert not any("LDL" in line or "STL" in line for a, b in loops for line in code.lines[a : b + 1])
    check_roles(code)
    check_products_in_flight(code)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("x", ["u4", "s8"])
@pytest.mark.parametrize("width", [7, 14, 28, 56])
@pytest.mark.parametrize(("kernel", "channels"), [(1, 128), (1, 512), (1, 2048), (3, 128), (3, 512), (5, 128)])
def test_shared_memory(x, width, kernel, channels, tile):
    """Every layer fits shared memory, no strip exceeds one TMA copy, and wide images are read tap by tap. Weights are resident
    only if there are few.
    """
    spec = plain_layer(channels, 128, kernel, 1, x, x, residual=x).spec
    tile = deep_tile(spec, *tile)
    config = deep_config(spec, tile, width)
    assert tile.blocks * (config.shared_bytes + 1024) <= 228 * 1024 and config.rows <= 256 and config.x_stages >= 2
    assert config.stages >= 2 or config.resident == steps_of(spec, tile.step_bytes) * config.planes
    assert config.strips == (config.tile_pixels + kernel // 2 * 2 * (width + 1) <= 256)
    assert config.x_barriers.start >= config.w_barriers.start + 16 * config.stages
    assert config.strip.zeros + 16 <= config.constants_start and config.strip.zeros % 16 == 0


def test_refusals():
    assert deep_refusals(plain_layer(128, 256).spec) == ()
    assert "multiples of 128" in deep_refusals(plain_layer(64, 256).spec)[0]
    assert "multiples of 128" in deep_refusals(plain_layer(256, 64).spec)[0]
    assert "stored as f32" in deep_refusals(plain_layer(128, 128, y="f32").spec)[0]
    assert "residual" in deep_refusals(plain_layer(128, 128, residual="s8").spec)[0]
    second = SecondProduct(torch.zeros(128, 128, 1, 1, dtype=torch.int8), torch.zeros(128), "s8")
    assert "second product" in deep_refusals(plain_layer(128, 128, second=second).spec)[0]


def test_tiles():
    """14 x 14 pixels and 256 outputs on 132 SMs: batch 128 has 262 large tiles; batch 32 has 66 large or 196 small ones."""
    spec, machine = plain_layer(256, 256).spec, typical_machine(90)
    wanted = {128: WIDE, 64: WIDE, 32: (1, 2), 1: (1, 1)}
    for batch, tile in wanted.items():
        assert choose_conv(spec, (batch, 14, 14), machine).tile == deep_tile(spec, *tile), batch
    assert choose_conv(plain_layer(64, 256).spec, (128, 14, 14), machine).kernel == "sm90/conv"


CASES = [
    (128, 128, 3, 1, (3, 9, 11), None),
    (256, 128, 3, 1, (5, 14, 13), "residual"),
    (250, 120, 3, 1, (40, 14, 14), None),
    (512, 128, 3, 1, (1, 28, 28), None),
    (128, 128, 3, 1, (2, 5, 80), None),
    (128, 128, 5, 1, (2, 10, 9), None),
    (384, 256, 3, 2, (3, 23, 17), None),
    (128, 128, 1, 2, (3, 15, 17), None),
    (256, 384, 1, 1, (5, 13, 11), "residual"),
    (2048, 512, 1, 1, (128, 7, 7), None),
    (128, 256, 1, 1, (5, 9, 13), (256, 2)),
    (128, 256, 3, 1, (5, 14, 13), (128, 1)),
]
"""(channels, outputs, window, stride, size, what is added: nothing, a residual, or a second product (channels, stride))."""

KINDS = [(WIDE, "u4", "u4"), (WIDE, "s8", "s8"), (WIDE, "u4", "s8"), (WIDE, "s8", "u4")]
KINDS += [
    ((1, 1), "u4", "u4"),
    ((1, 1), "s8", "u4"),
    ((1, 2), "s8", "s8"),
    ((1, 2), "u4", "s8"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "x", "y"), KINDS, ids=str)
@pytest.mark.parametrize(("c", "o", "kernel", "stride", "size", "added"), CASES)
def test_codes(c, o, kernel, stride, size, added, tile, x, y):
    torch.manual_seed(7)
    second = other = residual = None
    if isinstance(added, tuple):
        w2 = torch.randint(-128, 128, (o, added[0], 1, 1), dtype=torch.int8, device="cuda")
        second = SecondProduct(w2, 0.3 * layer(added[0], o, 1, 1, 0, x, y).s, x, (added[1], added[1]))
    conv = layer(c, o, kernel, stride, kernel // 2, x, y, y if added == "residual" else None, second=second)
    tile = deep_tile(conv.spec, *tile)
    numbers = WgmmaTiles(x, y, tile.outputs, tile.step_bytes, taps_first=True).pack_layer(conv)
    prepared = PreparedDeep(conv.spec, numbers, tile, torch.cuda.get_device_properties(0).multi_processor_count)
    codes = codes_of(x, size[0], c, *size[1:])
    packed = Nhwc64(x).pack(codes)
    shape = prepared.output_shape(tuple(packed.shape))
    if added == "residual":
        residual = codes_of(y, size[0], o, *shape[1:3])
    if isinstance(added, tuple):
        other = codes_of(x, size[0], added[0], added[1] * shape[1], added[1] * shape[2])
    given = [None if t is None else Nhwc64(kind).pack(t) for kind, t in ((y, residual), (x, other))]
    out = torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda")
    prepared(packed, *given, out)
    assert torch.equal(Nhwc64(y).unpack(out, o), conv_reference(codes, conv, residual, other))
    assert not Nhwc64(y).unpack(out, shape[3] * 8 // CODES[y].bits)[:, o:].any(), "filled up with 0"
    assert torch.equal(prepared(packed, *given), out)


@pytest.mark.parametrize(("x", "channels", "kernel", "width"), [("u4", 256, 1, 14), ("s8", 128, 3, 28)])
def test_warpgroups_take_turns(x, channels, kernel, width):
    """Each waits for the one before it, once a tile, and lets the next one start."""
    spec = plain_layer(channels, channels, kernel, 1, x, x, residual=None if kernel > 1 else x).spec
    config = deep_config(spec, deep_tile(spec, *WIDE), width, ordered=True)
    assert config.ordered and not deep_config(spec, deep_tile(spec, *WIDE), width).ordered
    code = compiled(config)
    assert sum("BAR.ARV" in line for line in code.lines) == 2, "the first turn, and the next one"
    assert code.stack_bytes == 0
    check_turns(code)
    assert not deep_config(plain_layer(512, 512).spec, deep_tile(spec, *WIDE), 7, ordered=True).ordered, "36 k blocks: no ring"
