"""Every conversion over every code in every slot, executed bit-exactly, and assembled by ptxas."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from lowbit.formats import FloatFormat, decode, int_format, number_format, uint_format
from lowbit.hardware.conversions import conversion, subnormal_codes
from lowbit.hardware.fields import field_order
from lowbit.hardware.half import round_half, widen_half
from lowbit.hardware.ptx import HalfArithmetic, HalfFma
from tests.formats import FLOAT_FORMATS, INT_FORMATS

CASES = [(f, d) for f in INT_FORMATS + FLOAT_FORMATS for d in ("fp16", "bf16")]
CASES = [
    (f, d)
    for f, d in CASES
    if not isinstance(f, FloatFormat) or d == "bf16" or f.exponent < 5 or (f.exponent == 5 and f.special == "ieee")
]
IDS = [f"{f.name}-{d}" for f, d in CASES]


def pack(codes, fmt):
    """Packs codes [cases, registers, 2] into words, bit by bit."""
    fields = field_order(fmt)
    words = [np.zeros(len(codes), np.uint32) for _ in range(fields.words)]
    for register, places in enumerate(fields.places):
        for element in range(2):
            for bit, (word, at) in enumerate(places):
                part = (codes[:, register, element].astype(np.uint32) >> np.uint32(bit)) & np.uint32(1)
                words[word] |= part << np.uint32(at + 16 * element)
    return words


@pytest.mark.parametrize(("fmt", "dtype"), CASES, ids=IDS)
def test_every_code_in_every_slot(fmt, dtype):
    c = conversion(fmt, dtype)
    values = decode(torch.arange(1 << fmt.bits, dtype=torch.uint8), fmt, torch.float64).numpy()
    usable = np.flatnonzero(np.isfinite(values)).astype(np.uint8)
    slots = 2 * c.registers
    rng = np.random.default_rng(0)
    codes = rng.choice(usable, (slots, len(usable), slots))
    for slot in range(slots):
        codes[slot, :, slot] = usable
    codes = codes.reshape(-1, c.registers, 2)
    got = c.run(pack(codes, fmt)) * c.scale_factor
    expected = values[codes]
    assert np.array_equal(got, expected)
    if isinstance(fmt, FloatFormat):
        assert np.array_equal(np.signbit(got), np.signbit(expected)), "the sign of zero is kept"


@pytest.mark.parametrize("fmt", [int_format(8), uint_format(8), int_format(4), uint_format(4)], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_all_pairs_of_codes_in_one_register(fmt, dtype):
    c = conversion(fmt, dtype)
    n = 1 << fmt.bits
    pairs = np.stack(np.meshgrid(np.arange(n), np.arange(n)), axis=-1).reshape(-1, 1, 2).astype(np.uint8)
    codes = np.repeat(pairs, c.registers, axis=1)
    assert np.array_equal(c.run(pack(codes, fmt)) * c.scale_factor, codes.astype(np.float64) - fmt.offset)


def test_known_constants():
    """The PTX has the immediates of the published kernels: 0xEA, 1032, 1/16, -72, 0x64, 1024, 1152, 136."""
    int4 = conversion(int_format(4), "fp16").program.ptx()
    for text in ("0x000f000f", "0x00f000f0", "0x64006400", "0xea", "0x64086408", "0x2c002c00", "0xd480d480"):
        assert text in int4.lower(), text
    assert "0x64806480" in conversion(int_format(8), "fp16").program.ptx()
    assert (
        "0x64006400" in conversion(uint_format(8), "fp16").program.ptx()
        and "prmt" in conversion(uint_format(8), "fp16").program.ptx()
    )
    bf16 = conversion(int_format(4), "bf16")
    for text in ("0x000f000f", "0x00f000f0", "0x7f007f00", "0x7d007d00", "0xbe00be00"):  # 2^127, 2^123, -8 / 64
        assert text in bf16.program.ptx().lower(), text
    assert bf16.scale_factor == 2**6 and "0x64006400" not in bf16.program.ptx()
    assert (0x64086408 & 0xFFFF, float(np.uint16(0x6408).view(np.float16))) == (0x6408, 1032.0)
    assert widen_half(np.array([0xBE00BE00], np.uint32), "bf16")[0, 0] == -8 / 64
    assert conversion(number_format("fp6_e3m2"), "fp16").scale_factor == 2**12
    assert conversion(number_format("fp8_e4m3"), "fp16").scale_factor == 2**8
    assert conversion(number_format("fp8_e5m2"), "fp16").scale_factor == 1
    assert conversion(int_format(8), "bf16").scale_factor == 2**6


def test_cost_of_int4_is_that_of_the_source():
    """Eight codes take 4 LOP3, 1 shift, 2 subtractions and 2 fused multiply-adds, as in the source."""
    c = conversion(int_format(4), "fp16")
    assert (c.registers, c.program.count("integer"), c.program.count("half")) == (4, 5, 4)


BUDGET = {
    "int2": (0.6, 0.6), "int3": (0.8, 0.9), "int4": (0.65, 0.65), "int5": (1.0, 1.15), "int6": (1.15, 1.4), "int7": (1.2, 1.2),
    "int8": (0.5, 0.5), "fp6_e3m2": (1.25, 2.25), "fp5_e2m2": (1.4, 2.3), "fp6_e2m3": (1.9, 2.35), "fp4_e2m1": (1.4, 1.65),
    "fp8_e4m3": (1.25, 1.75), "fp8_e5m2": (0.75, 1.75),
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGET)
def test_integer_instructions_per_weight(name):
    """At full memory bandwidth an SM of an H200 receives 158 bits of codes per clock and has 64 integer lanes (docs/log). The
    conversions must keep up.

    Conversions of floats to bf16 exceed the budget, since the exponent has to move and the sign has not. Left shifts run as
    multiplications on another pipe, which mostly compensates for that.
    """
    for dtype, budget in zip(("fp16", "bf16"), BUDGET[name], strict=True):
        c = conversion(number_format(name), dtype)
        assert c.integer_per_weight <= budget
        assert c.half_per_weight <= 0.5
    assert conversion(number_format(name), "fp16").integer_per_weight * 158 / number_format(name).bits < 64


@pytest.mark.parametrize("name", ["fp6_e5m0", "fp7_e5m1", "fp7_e6m0", "fp8_e7m0"])
def test_exponents_that_fp16_does_not_have_are_refused(name):
    with pytest.raises(ValueError, match="bf16 takes it"):
        conversion(number_format(name), "fp16")
    conversion(number_format(name), "bf16")


def kernel(c):
    """The text of a PTX kernel that loads the words, converts and stores them."""
    n_in, n_out = len(c.program.inputs), len(c.program.outputs)
    loads = "\n".join(f"ld.global.b32 {name}, [%in + {4 * i}];" for i, name in enumerate(c.program.inputs))
    stores = "\n".join(f"st.global.b32 [%out + {4 * i}], {name};" for i, name in enumerate(c.program.outputs))
    assert n_in and n_out
    return f""".version 8.0
.target sm_SM
.address_size 64
.visible .entry convert(.param .u64 a, .param .u64 b) {{
.reg .b64 %in, %out;
.reg .b32 {", ".join(c.program.inputs)};
ld.param.u64 %in, [a];
ld.param.u64 %out, [b];
{loads}
{c.program.ptx()}
{stores}
ret;
}}
"""


@pytest.mark.parametrize("sm", ["80", "90a"])
def test_ptxas_takes_every_program(tmp_path, sm):
    triton = pytest.importorskip("triton", reason="Triton ships ptxas")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (tools / "ptxas").exists():
        pytest.skip(f"no ptxas in {tools}")
    for fmt, dtype in CASES:
        c = conversion(fmt, dtype)
        source = tmp_path / f"{fmt.name}-{dtype}.ptx"
        source.write_text(kernel(c).replace("sm_SM", f"sm_{sm}"))
        done = subprocess.run(
            [tools / "ptxas", f"-arch=sm_{sm}", "-o", source.with_suffix(".cubin"), source],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{c.name}: {done.stderr}"
    sass = subprocess.run(
        [tools / "cuobjdump", "-sass", tmp_path / "int4-fp16.cubin"], capture_output=True, text=True, check=True
    )
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9]+)", sass.stdout, re.MULTILINE)
    half = sum(op in ("HADD2", "HFMA2") for op in opcodes)
    assert opcodes.count("LOP3") == 4 and half >= 4, opcodes


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", range(2, 8))
def test_codes_as_subnormal_numbers_make_the_same_weights(bits, dtype):
    """Codes can be used as subnormal numbers. A masked code is code * 2^up times the dtype's smallest number. It is multiplied
    by (scale * 2^-up), minus offset * scale, and rounded once. The result has the same bits as the exact (code - offset) times
    the scale, for scales down to 1/32 of the largest."""
    fmt, rng, least = number_format(f"int{bits}"), np.random.default_rng(bits), {"fp16": 24, "bf16": 133}[dtype]
    masked, whole = subnormal_codes(fmt, dtype), conversion(fmt, dtype)
    words = rng.integers(0, 1 << 32, (masked.fields.words, 1 << 15), dtype=np.uint64).astype(np.uint32)
    waits = np.arange(0x6400, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)  # 1024 to 65504
    if dtype == "bf16":  # 1024 to 65280 with 8 significant bits, over 2^24 times the smallest number, as in the kernels
        waits = np.unique(widen_half(round_half(np.stack([waits, waits], axis=-1), np.zeros(()), dtype), dtype)) * 2.0 ** (
            least - 24
        )
    waits = rng.choice(waits, words.shape[1]) * rng.choice([-1.0, 1.0], words.shape[1])

    def pair(values):
        return round_half(np.stack([values, values], axis=-1), np.zeros(()), dtype)

    def times(a, b):
        return HalfArithmetic("", "mul", dtype, "", "").evaluate(a, b)

    minus = times(pair(waits), pair(np.full(len(waits), fmt.min * 2.0**-least)))
    for register, up, exact in zip(masked.program.run(list(words)), masked.up, whole.program.run(list(words)), strict=True):
        scale = times(pair(waits), pair(np.full(len(waits), 2.0**-up)))
        value = widen_half(exact, dtype) * whole.scale_factor
        assert np.array_equal(widen_half(register, dtype) * 2.0 ** (least - up) + fmt.min, value)
        found = widen_half(HalfFma("", dtype, "", "", "").evaluate(register, scale, minus), dtype)
        today = widen_half(times(exact, pair(waits * 2.0**-17 * whole.scale_factor)), dtype)
        assert np.array_equal(found * 2.0 ** (least - 17), today)
