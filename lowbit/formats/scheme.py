"""A quantization scheme and its name.

Grammar (lower case):

    w<format>a<format>[_<granularity>][_<zero>][_az][_<rule>]

    format       <bits>            integers: w4, a8        (w16 and a16: left in fp16/bf16)
                 <bits>e<X>m<Y>    floats:   w6e3m2, a8e4m3
    granularity  _g<size>          groups along K          (per output channel when absent, but for w4a16, see below)
                 _pc               per output channel, explicitly
                 _b<n>x<k>         blocks
                 _t                one scale per tensor, of activations too if they are quantized (calibrated)
    zero         _z                integer zero points     w = (code - zero) * scale
                 _fz               floating-point zeros    w = code * scale + zero
    _az                            zero points of integer activations, of each token or calibrated  x = (code - zero) * scale
    rule         _ct _hf _fb       activations quantized by another tool's rule, for its files (`ActivationRule`)

`w4a16_g128`, `w6e3m2a16`, `w4a16_g32_fz`, `w8a8`, `w8a8_az`, `w8a8_ct`. `ALIASES` has names of other tools.
`w4a16` is one of them: compressed-tensors' preset with groups of 128. One scale per channel is `w4a16_pc`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from enum import Enum

from lowbit.formats.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor
from lowbit.formats.number import IntFormat, NumberFormat, float_format, int_format, uint_format

ALIASES: dict[str, str] = {
    # DeepSpeed-MII's quantization_mode
    "wf6af16": "w6e3m2a16",
    "wf5af16": "w5e2m2a16",
    "wi8af16": "w8a16",
    "wi4af16": "w4a16_g128",
    # compressed-tensors' and llm-compressor's presets
    "w8a16": "w8a16",
    "w4a16": "w4a16_g128",
    "w4a16_asym": "w4a16_g128_z",
    "w8a8": "w8a8",
    "int8": "w8a8",
    "fp8": "w8e4m3a8e4m3_t",
    "fp8_dynamic": "w8e4m3a8e4m3",
    "fp8_block": "w8e4m3a8e4m3_b128x128",
}
"""Names of other tools (lower case, matched case-insensitively) and their schemes."""

_NAME = re.compile(
    r"w(?P<w>\d+(?:e\d+m\d+)?)a(?P<a>\d+(?:e\d+m\d+)?)"
    r"(?:_(?:g(?P<group>\d+)|b(?P<bn>\d+)x(?P<bk>\d+)|(?P<tensor>t)|(?P<channel>pc)))?"
    r"(?:_(?P<zero>z|fz))?(?:_(?P<az>az))?(?:_(?P<rule>ct|hf|fb))?"
)
GRAMMAR = "w<bits>[e<X>m<Y>]a<16|8|8e4m3|8e5m2>[_g<size>|_b<n>x<k>|_t|_pc][_z|_fz][_az][_ct|_hf|_fb]"
PRESET = "w4a16 means groups of 128; w4a16_pc has one scale per channel"
"""Explains the one name that has another meaning than the grammar gives it, since other tools defined it first."""

_GGUF = {
    "q2": "w2a16_g16_fz", "q3": "w3a16_g16", "q4": "w4a16_g32_fz", "q5": "w5a16_g32_fz", "q6": "w6a16_g16",
    "q8": "w8a16_g32", "q4_0": "w4a16_g32", "q5_0": "w5a16_g32",
}  # fmt: skip
"""The scheme most similar to each of llama.cpp's types, for error messages; GGUF files need no scheme."""
_NEAR_MISSES = {
    "int2": "w2a16_g64", "int3": "w3a16_g64", "int4": "w4a16_g128", "int5": "w5a16", "int6": "w6a16", "uint4": "w4a16_g128_z",
    "i4": "w4a16_g128", "w4": "w4a16_g128", "4bit": "w4a16_g128", "8bit": "w8a16", "i8": "w8a8", "w8": "w8a16",
    "fp4": "w4e2m1a16_g32", "mxfp4": "w4e2m1a16_g32", "nvfp4": "w4e2m1a16_g16", "nf4": "w4a16_g64", "fp5": "w5e2m2a16",
    "fp6": "w6e3m2a16", "mxfp6": "w6e3m2a16_g32", "f8": "fp8", "float8": "fp8", "e4m3": "fp8", "mxfp8": "w8e4m3a16_g32",
    "w4a8": "w4a8_g128",
}  # fmt: skip
"""Names that are not schemes (letters and digits only), and the scheme that an error message proposes for each."""
_METHODS = ("rtn", "hqq", "gptq", "awq", "smoothquant", "learned")
_EXAMPLES = (
    "w4a16_g64", "w4a16_g128", "w4a16_pc", "w4a16_g32_fz", "w4a16_g64_fz", "w4a16_g64_z", "w4a16_g128_z", "w6e3m2a16",
    "w5e2m2a16", "w8a8_az", "w4a8_g128",
)  # fmt: skip
"""Further names that an error message may propose for a typing mistake."""


class ZeroPoint(Enum):
    """The kind of zero points of a scheme."""

    NONE = ""
    INTEGER = "z"
    """An unsigned code of the weight format: w = (code - zero) * scale, as in GPTQ and AWQ files."""
    FLOAT = "fz"
    """A number in units of the weight: w = code * scale + zero, as in TensorRT-LLM's GPTQ path and GGUF's Q4_1."""


class ActivationRule(Enum):
    """The rule by which activations are quantized: dtype of the arithmetic, scale and rounding. Tools differ in these; a model
    runs with the rule of the tool that wrote its files. kernels/reference/ has the arithmetic, docs/internals/numerics.md the
    sources."""

    OWN = ""
    """In float32: scale = max|x| / largest code (int8: 127), code = x * (1 / scale)."""
    COMPRESSED_TENSORS = "ct"
    """Every step rounded to x's type: scale = max|x| / half the range of codes (int8: 127.5), code = x / scale."""
    FINEGRAINED_FP8 = "hf"
    """Transformers' fp8, in float32: scale = max|x| / 448, at least 1e-12, code = x / scale."""
    FBGEMM = "fb"
    """FBGEMM's rows of fp8, in float32: scale = min(max|x|, 1200) / 448, at least 1 / (448 * 512), code = x / scale."""


@dataclass(frozen=True)
class Scheme:
    """Weight format, activation format (None: fp16 or bf16), scale granularity of the weight, kind of its zero
    points, whether activations have zero points as well, and the rule by which they are quantized.

    `name` is canonical: `parse_scheme(scheme.name) == scheme`. It is computed once, since every call of a layer reads it.
    """

    weight: NumberFormat
    activation: NumberFormat | None = None
    granularity: Granularity = PerChannel()
    zero: ZeroPoint = ZeroPoint.NONE
    activation_zero: bool = False
    rule: ActivationRule = ActivationRule.OWN
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.zero is not ZeroPoint.NONE:
            if not isinstance(self.weight, IntFormat):
                raise ValueError(f"zero points go with integer weights, not with {self.weight.name}")
            if self.weight.signed:
                raise ValueError(f"a scheme with zero points has unsigned codes: u{self.weight.name}, not {self.weight.name}")
        elif isinstance(self.weight, IntFormat) and not self.weight.signed:
            raise ValueError(f"{self.weight.name} without zero points holds no negative weight; use int{self.weight.bits}")
        if self.activation_zero and (not isinstance(self.activation, IntFormat) or isinstance(self.granularity, PerBlock)):
            raise ValueError(
                "zero points of activations (_az) go with integer activations of one scale per token or layer, such as w8a8_az"
            )
        self._check_rule()
        object.__setattr__(self, "name", _name_of(self))

    def _check_rule(self) -> None:
        if self.rule is ActivationRule.OWN:
            return
        e4m3 = self.activation == float_format(4, 3)
        if self.rule is ActivationRule.COMPRESSED_TENSORS:
            allowed = e4m3 or self.activation == float_format(2, 1) or isinstance(self.activation, IntFormat)
            formats = "integers, e4m3 or e2m1"
        else:
            allowed, formats = e4m3, "e4m3"
        if not allowed:
            given = "16 bits" if self.activation is None else self.activation.name
            raise ValueError(f"the rule _{self.rule.value} quantizes activations to {formats}, not to {given}")

    @property
    def weight_only(self) -> Scheme:
        """The scheme with the same weights and 16-bit activations."""
        return replace(self, activation=None, activation_zero=False, rule=ActivationRule.OWN)

    @property
    def static_activations(self) -> bool:
        """True if activations have one calibrated scale. They have it if the weights have one scale for the whole tensor."""
        return self.activation is not None and isinstance(self.granularity, PerTensor)

    def __str__(self) -> str:
        return self.name


def parse_scheme(name: str | Scheme) -> Scheme:
    """Returns the scheme called `name`, in this library's grammar or by another tool's name; returns a Scheme as it is.

    Raises ValueError with the grammar and a proposal for an unknown name.
    """
    if isinstance(name, Scheme):
        return name
    if not isinstance(name, str):
        raise ValueError(f"a scheme is a name such as 'w4a16_g128', got {name!r}")
    lower = name.strip().lower()
    match = _NAME.fullmatch(ALIASES.get(lower, lower))
    if match is None:
        raise ValueError(
            f"unknown scheme {name!r}; {_meant(lower)}the grammar is {GRAMMAR}, for example w4a16_g128, w6e3m2a16, "
            f"w4a16_g32_fz ({PRESET}); aliases: {', '.join(sorted(ALIASES))}"
        )
    if match["w"] == "16":
        raise ValueError(f"scheme {name!r} leaves the weights in 16 bits: nothing to quantize")
    zero = ZeroPoint(match["zero"] or "")
    weight = _parse_format(match["w"], unsigned=zero is not ZeroPoint.NONE)
    activation = None if match["a"] == "16" else _parse_format(match["a"], unsigned=False)
    granularity: Granularity = PerChannel()
    if match["group"]:
        granularity = PerGroup(int(match["group"]))
    elif match["bn"]:
        granularity = PerBlock(int(match["bn"]), int(match["bk"]))
    elif match["tensor"]:
        granularity = PerTensor()
    return Scheme(weight, activation, granularity, zero, match["az"] is not None, ActivationRule(match["rule"] or ""))


def _meant(lower: str) -> str:
    """Returns the beginning of an error message that proposes a similar scheme; empty if there is none."""
    bare = re.sub(r"[^a-z0-9]", "", lower)
    if bare in _METHODS:
        return f"{lower} is a method: say it as method, and for the scheme for example w4a16_g128; "
    if gguf := re.fullmatch(r"(q[234568])(?:_?([01]|k(?:_?(?:[sml]|xl))?))?", lower):
        plain = f"{gguf[1]}_0" if gguf[2] == "0" else gguf[1]
        return (
            f"did you mean {_GGUF.get(plain, _GGUF[gguf[1]])!r}? (files of llama.cpp are run as they are, without a scheme); "
        )
    if bare in _NEAR_MISSES:
        why = " (lowbit has no NF4)" if bare == "nf4" else ""
        return f"did you mean {_NEAR_MISSES[bare]!r}{why}? "
    if group := re.fullmatch(r"(?:w|int)?([2-8])(?:bit|a16)?g(\d+)", bare):
        return f"did you mean 'w{group[1]}a16_g{group[2]}'? "
    near = difflib.get_close_matches(lower, (*ALIASES, *_EXAMPLES), n=1, cutoff=0.7)
    return f"did you mean {near[0]!r}? " if near else ""


def _parse_format(text: str, unsigned: bool) -> NumberFormat:
    if "e" not in text:
        return uint_format(int(text)) if unsigned else int_format(int(text))
    bits, exponent, mantissa = (int(v) for v in re.split("[em]", text))
    fmt = float_format(exponent, mantissa)
    if fmt.bits != bits:
        raise ValueError(f"{text!r}: 1 sign + {exponent} exponent + {mantissa} mantissa bits are {fmt.bits}, not {bits}")
    return fmt


def _name_of(scheme: Scheme) -> str:
    activation = "16" if scheme.activation is None else _format_part(scheme.activation)
    zero = f"_{scheme.zero.value}" if scheme.zero is not ZeroPoint.NONE else ""
    rule = f"_{scheme.rule.value}" if scheme.rule is not ActivationRule.OWN else ""
    az = "_az" * scheme.activation_zero
    return f"w{_format_part(scheme.weight)}a{activation}{_granularity_part(scheme)}{zero}{az}{rule}"


def _format_part(fmt: NumberFormat) -> str:
    return str(fmt.bits) if isinstance(fmt, IntFormat) else f"{fmt.bits}e{fmt.exponent}m{fmt.mantissa}"


def _granularity_part(scheme: Scheme) -> str:
    match scheme.granularity:
        case PerGroup(size):
            return f"_g{size}"
        case PerBlock(n, k):
            return f"_b{n}x{k}"
        case PerTensor():
            return "_t"
    plain = f"w{_format_part(scheme.weight)}a{'16' if scheme.activation is None else _format_part(scheme.activation)}"
    # The bare name of an alias has another meaning (w4a16 is a preset with groups): add "per channel" there.
    bare_is_taken = scheme.zero is ZeroPoint.NONE and ALIASES.get(plain, plain) != plain
    return "_pc" if bare_is_taken else ""
