"""Heads of one token in the registers of a block of 128 threads: norm, RoPE, rotation and rounding to codes. Gluon.

A row is a head. 16 threads share a row, so the block has 8 rows; thread l of a row holds the chunks of 8 elements l and l + 16.
Tensors are float32 [128, C.elements], 8 or 16 elements per thread; elements beyond the head are zero. `C` is the kernel's
configuration, with the attention shape as `C.shape`. Elements of a thread are combined in registers, those of a row by
shuffles, so there is no barrier.

Exact   a rotation adds in the order of formats/kv.py. Codes are those of formats/kv.py to the last bit.
        Tests: tests/kernels/parts/test_head_rows.py
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon

THREADS = 128

ROWS = 8

LANES = THREADS // ROWS
"""Number of threads of a row."""

MOST_SCALE = gl.constexpr(65504.0)

MAGIC = gl.constexpr(12582912.0)
"""1.5 * 2^23: x + MAGIC has the integer nearest to x, ties to even, in its low bits."""

MAGIC_BITS = gl.constexpr(0x4B400000)


def elements_of(head_dim: int) -> int:
    """Returns the number of elements per thread of heads of up to 256 elements."""
    return 8 * -(-head_dim // (8 * LANES))


def rows_layout(head_dim: int) -> gl.BlockedLayout:
    """Returns the layout of rows of heads."""
    return gl.BlockedLayout([1, elements_of(head_dim)], [32, 1], [THREADS // 32, 1], [1, 0])


EXCHANGE = gl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;")


@gluon.jit
def exchanged(x, apart: gl.constexpr):
    """Returns the value of the thread whose index within the warp differs by the bits of `apart`."""
    return gl.inline_asm_elementwise(EXCHANGE, "=r,r,r", [x, apart], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def row_sum(x):
    """Returns the sum of each row [128], in all its threads."""
    total = gl.sum(x, 1)
    for step in gl.static_range(4):
        total += exchanged(total, 1 << step)
    return total


@gluon.jit
def row_max(x):
    """Returns the maximum of each row [128], in all its threads; NaN does not count."""
    most = gl.max(x, 1)
    for step in gl.static_range(4):
        most = gl.maximum(most, exchanged(most, 1 << step))
    return most


@gluon.jit
def element_index(C: gl.constexpr):
    """Returns the index within its head of each element."""
    LAYOUT: gl.constexpr = C.rows_layout
    thread = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))[:, None]
    i = gl.arange(0, C.elements, gl.SliceLayout(0, LAYOUT))[None, :]
    d = (thread % 16 + i // 8 * 16) * 8 + i % 8
    return gl.multiple_of(gl.max_contiguous(d, [1, 8]), [1, 8])


@gluon.jit
def partner(d, C: gl.constexpr):
    """Returns the element with which RoPE rotates element d; d itself for elements that RoPE does not rotate."""
    HALF: gl.constexpr = C.shape.rotary_dim // 2
    other = gl.where(d < HALF, d + HALF, gl.where(d < 2 * HALF, d - HALF, d))
    if HALF % 8 == 0:
        other = gl.multiple_of(gl.max_contiguous(other, [1, 8]), [1, 8])
    return other


@gluon.jit
def angles(cos_sin, position, d, C: gl.constexpr):
    """Returns cos and signed sin (negative in the first half of the elements that RoPE rotates) at a position; 1 and 0 for
    elements that RoPE does not rotate."""
    HALF: gl.constexpr = C.shape.rotary_dim // 2
    at = cos_sin + (position.to(gl.int64) * C.shape.rotary_dim + gl.where(d < HALF, d, d - HALF))
    cos = gl.load(at, mask=d < 2 * HALF, other=1.0)
    sin = gl.load(at + HALF, mask=d < 2 * HALF, other=0.0)
    return cos, gl.where(d < HALF, -sin, sin)


@gluon.jit
def gammas(gamma, d, C: gl.constexpr):
    """Returns the factors of a norm: gamma plus the norm's offset."""
    return gl.load(gamma + d, mask=d < C.shape.head_dim, other=0.0).to(gl.float32) + C.shape.norm_offset


@gluon.jit
def turned_rows(rows, exist, gamma, cos, sin, d, C: gl.constexpr):
    """Loads heads at pointers `rows` [128, 1] and returns them after norm (if there is a gamma) and RoPE, rounded to their
    type. Rows whose `exist` [128, 1] is False are zeros."""
    exist = exist & (d < C.shape.head_dim)
    x = gl.load(rows + d, mask=exist, other=0.0).to(gl.float32)
    root = x
    if gamma is not None:
        root = gl.rsqrt(row_sum(x * x) / C.shape.head_dim + C.shape.norm_eps)[:, None]
        root = gl.broadcast(root, x)[0]
        x = x * root * gammas(gamma, d, C)
    if C.shape.rotary_dim > 0:
        other = gl.load(rows + partner(d, C), mask=exist, other=0.0).to(gl.float32)
        if gamma is not None:
            other = other * root * gammas(gamma, partner(d, C), C)
        x = x * cos + other * sin
    return x.to(rows.dtype.element_ty).to(gl.float32)


@gluon.jit
def within(x, apart: gl.constexpr):
    """Returns a + b and a - b for elements at distance `apart` within a thread."""
    THREADS: gl.constexpr = x.shape[0]
    COUNT: gl.constexpr = x.shape[1]
    pairs = gl.permute(gl.reshape(x, (THREADS, COUNT // (2 * apart), 2, apart)), (0, 1, 3, 2))
    a, b = gl.split(pairs)
    both = gl.permute(gl.join(a + b, a - b), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(both, (THREADS, COUNT)), x.type.layout)


@gluon.jit
def rotated(x, C: gl.constexpr):
    """Multiplies heads by a Hadamard matrix, block by block. A block is the largest power of two that divides the head."""
    STEPS: gl.constexpr = C.rotation_steps
    LAYOUT: gl.constexpr = C.rows_layout
    thread = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))[:, None]
    for step in gl.static_range(STEPS):
        if step < 3:
            x = within(x, 1 << step)
        elif step < 7:
            other = exchanged(x, 1 << (step - 3))
            x = gl.where((thread >> (step - 3)) % 2 == 0, x + other, other - x)
        else:
            x = within(x, 8 << (step - 7))
    return x * C.rotation_factor


@gluon.jit
def row_scale(x, largest: gl.constexpr):
    """Returns the fp16 scale [128] of each row; NaN for rows with an infinity or NaN."""
    INVERSE: gl.constexpr = 1.0 / largest
    scale = gl.minimum(row_max(gl.abs(x)) * INVERSE, MOST_SCALE)
    nothing = row_sum(x * 0.0)  # NaN for rows that are not finite
    return (scale + nothing).to(gl.float16)


@gluon.jit
def row_codes(x, scale, fmt: gl.constexpr):
    """Returns codes int32 of rows with scales fp16 [128]."""
    wide = scale.to(gl.float32)
    inverse = gl.where(wide > 0, gl.div_rn(gl.full_like(wide, 1.0), wide), 0.0)
    # For the integer formats `rounded` adds to this product. The compiler would fuse a plain product with that addition; a fma
    # with 0 is rounded on its own.
    ratio = x * inverse[:, None] if fmt == "fp8" else gl.fma(x, inverse[:, None], 0.0)
    if fmt == "int4":
        return gl.minimum(gl.maximum(rounded(ratio + 7.5), 0), 15)
    elif fmt == "int8":
        return gl.minimum(gl.maximum(rounded(ratio), -127), 127) + 128
    else:
        return e4m3_codes(ratio)


@gluon.jit
def rounded(x):
    """Returns the nearest integers, ties to even, of numbers below 2^22. Results for larger numbers are meaningless."""
    return (x + MAGIC).to(gl.int32, bitcast=True) - MAGIC_BITS


@gluon.jit
def e4m3_codes(x):
    """Returns the nearest e4m3 codes, ties to even, of numbers up to 448; larger ones saturate. Below 2^-6 codes are multiples
    of 2^-9."""
    bits = gl.abs(x).to(gl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    code = gl.where(gl.abs(x) < 0.015625, rounded(gl.abs(x) * 512.0), normal)
    return gl.where(x.to(gl.int32, bitcast=True) < 0, 128, 0) | gl.minimum(gl.maximum(code, 0), 126)


@gluon.jit
def code_values(codes, fmt: gl.constexpr):
    """Returns the values of codes, without scale."""
    if fmt == "int4":
        return codes.to(gl.float32) - 7.5
    elif fmt == "int8":
        return codes.to(gl.float32) - 128.0
    else:
        half = ((codes & 128) << 8 | (codes & 127) << 7).to(gl.int16).to(gl.float16, bitcast=True)
        return half.to(gl.float32) * 256.0
