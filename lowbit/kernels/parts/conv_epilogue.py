"""The epilogue of the convolution kernels of sm_90: constants, residual codes, requantization, stores.

For each of its pixels a thread holds sums of neighbouring channels (pack/conv_layout.py). So it loads and stores words of codes
8 or 16 bytes at a time, without an exchange between threads. C is a WgmmaConv of parts/conv_tile.py.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon


@gluon.jit
def by_groups(tile, C: gl.constexpr):
    """Reshapes [pixels, outputs] -> [pixels, units, 4 lanes, groups, 2, 2, 2]: a thread's columns, 8 to a group."""
    parts = gl.reshape(tile, [C.pixels, C.units, C.groups, 2, 2, 4, 2])
    return gl.permute(parts, [0, 1, 5, 2, 3, 4, 6])


@gluon.jit
def split_groups(tile, C: gl.constexpr):
    """Splits [pixels, outputs] -> 8 tensors [pixels, units, 4 lanes, groups], the columns of a group in order."""
    even, odd = gl.split(by_groups(tile, C))
    e0, e1 = gl.split(even)
    o0, o1 = gl.split(odd)
    c0, c4 = gl.split(e0)
    c2, c6 = gl.split(e1)
    c1, c5 = gl.split(o0)
    c3, c7 = gl.split(o1)
    return (c0, c1, c2, c3) + (c4, c5, c6, c7)


@gluon.jit
def codes_at(base, first_pixel, first_unit, pixels, row_units, words: gl.constexpr, C: gl.constexpr):
    """Returns pointers to the `words` words of each thread, pixel and unit, and their mask. A pixel has row_units * 4 * words
    words in memory."""
    L: gl.constexpr = C.words_layout(words)
    PIXEL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    UNITS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    WORDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    pixel = first_pixel + gl.arange(0, C.pixels, PIXEL)[:, None, None, None]
    unit = first_unit + gl.arange(0, C.units, UNITS)[None, :, None, None]
    lane = gl.arange(0, 4, LANES)[None, None, :, None]
    word = gl.arange(0, words, WORDS)[None, None, None, :]
    return base + ((pixel * row_units + unit) * 4 + lane) * words + word, pixel < pixels


@gluon.jit
def constants(values, across, C: gl.constexpr):
    """Loads the constants [outputs] of a range of outputs, 16 bytes at a time. pack/conv_layout.py stores them in this order
    (`lane_constants`)."""
    return by_columns(gl.load(values + across * C.outputs + places_of_constants(C)), C)


@gluon.jit
def places_of_constants(C: gl.constexpr):
    """Returns the offsets [outputs / 16, 4 lanes, 4] of a thread's constants; four are contiguous in memory."""
    L: gl.constexpr = C.constants_layout
    block = gl.arange(0, C.outputs // 16, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    value = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return block * 16 + lane * 4 + value


@gluon.jit
def by_columns(found, C: gl.constexpr):
    """Reorders constants to [outputs] in the column layout of the sums; this takes no instruction."""
    columns = gl.reshape(gl.permute(gl.reshape(found, [C.outputs // 16, 4, 2, 2]), [0, 2, 1, 3]), [C.outputs])
    return gl.convert_layout(columns, gl.SliceLayout(0, C.accumulator), assert_trivial=True)


@gluon.jit
def keep_constants(s, b, across, C: gl.constexpr):
    """Loads s and b of a block's outputs into registers, if C.keeps_constants; else returns ()."""
    kept = ()
    if C.keeps_constants:
        kept = (constants(s, across, C), constants(b, across, C))
    return kept


@gluon.jit
def tile_constants(kept, s, b, across, C: gl.constexpr):
    """Returns s and b of a block's outputs: from `kept`, or loaded again for this tile."""
    if C.keeps_constants:
        return kept[0], kept[1]
    else:
        return constants(s, across, C), constants(b, across, C)


@gluon.jit
def per_column(values, C: gl.constexpr):
    """Broadcasts values [outputs] to [pixels, outputs]; returns values that are already [pixels, outputs] unchanged."""
    if len(values.shape) == 2:
        return values
    else:
        return gl.expand_dims(values, 0).broadcast_to([C.pixels, C.outputs])


@gluon.jit
def load_residual(residual, first_pixel, first_unit, pixels, row_units, C: gl.constexpr):
    """Loads the words of a tile's residual codes; called before the products, to overlap with them."""
    at, exists = codes_at(residual, first_pixel, first_unit, pixels, row_units, C.residual_words, C)
    return gl.load(at, mask=exists, other=0)


@gluon.jit
def requantized(codes, acc, s, b, g, C: gl.constexpr):
    """Requantizes a tile of sums, with the residual `codes` added, to words [pixels, units, 4, words]."""
    R: gl.constexpr = C.requantize
    sums = split_groups(acc, C)
    LIKE: gl.constexpr = sums[0].type.layout
    inputs = sums + split_groups(per_column(s, C), C) + split_groups(per_column(b, C), C)
    if R.residual_words > 0:
        if R.residual_words == 2:
            low, high = gl.split(gl.reshape(codes, [C.pixels, C.units, 4, C.groups, 2]))
            inputs = inputs + (
                gl.convert_layout(low, LIKE, assert_trivial=True), gl.convert_layout(high, LIKE, assert_trivial=True),
            )  # fmt: skip
        else:
            inputs = inputs + (gl.convert_layout(codes, LIKE, assert_trivial=True),)
        inputs = inputs + (gl.full(sums[0].shape, g, gl.float32, LIKE),)
    out = gl.inline_asm_elementwise(R.asm, R.constraints, inputs, dtype=C.words, is_pure=True, pack=1)
    if R.words == 2:
        words = gl.reshape(gl.join(out[0], out[1]), [C.pixels, C.units, 4, C.out_words])
    else:
        words = out[0]
    return gl.convert_layout(words, C.words_layout(C.out_words), assert_trivial=True)


@gluon.jit
def store_codes(y, codes, acc, s, b, g, first_pixel, first_unit, pixels, row_units, C: gl.constexpr):
    """Requantizes the sums of a tile and stores them, 16 bytes a thread."""
    at, exists = codes_at(y, first_pixel, first_unit, pixels, row_units, C.out_words, C)
    gl.store(at, requantized(codes, acc, s, b, g, C), mask=exists)


@gluon.jit
def as_float(acc, s, b, C: gl.constexpr):
    """fma(float(sum), s[column], b[column])."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f32.s32 $0, $1; fma.rn.f32 $0, $0, $2, $3;", "=&f,r,f,f", [acc, per_column(s, C), per_column(b, C)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def store_values(y, acc, s, b, first_pixel, first_output, pixels, channels, C: gl.constexpr):
    """Stores values of 16 or 32 bits, plain NHWC without padded channels."""
    value = as_float(acc, s, b, C)
    if C.relu:
        value = gl.maximum(value, 0.0)
    pixel = first_pixel + gl.arange(0, C.pixels, gl.SliceLayout(1, C.accumulator))
    output = first_output + gl.arange(0, C.outputs, gl.SliceLayout(0, C.accumulator))
    at = y + pixel.to(gl.int64)[:, None] * channels + output[None, :]
    gl.store(at, value.to(y.dtype.element_ty), mask=(pixel < pixels)[:, None] & (output < channels)[None, :])
