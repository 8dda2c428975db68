"""Lower bounds of a GEMM: the bytes that must be moved once, and the operations that must be computed.

All implementations of a scheme have the same bound: the size of codes, scales and zeros, without the padding of their layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import Scheme, ZeroPoint, scale_shape
from lowbit.quantize.rtn import scale_dtype

ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Ceilings:
    """The highest measured rates of the machine in the same run: bytes read per second and fp16 operations per second."""

    read_bytes_per_s: float
    fp16_flops: float


def weight_bytes(scheme: Scheme | None, n: int, k: int) -> float:
    """Returns the bytes of codes, scales and zeros of a weight [n, k]. A scheme of None means 16-bit weights.

    w4a16_g128 of 8192 x 8192: 8192 * 8192 * 4/8 + 8192 * 64 * 2 (fp16 scales) = 34,603,008.
    """
    if scheme is None:
        return 2.0 * n * k
    rows, columns = scale_shape(scheme.granularity, (n, k))
    per_scale = float(scale_dtype(scheme).itemsize)
    if scheme.zero is ZeroPoint.INTEGER:
        per_scale += scheme.weight.bits / 8
    elif scheme.zero is ZeroPoint.FLOAT:
        per_scale *= 2
    return n * k * scheme.weight.bits / 8 + rows * columns * per_scale


def problem_bytes(scheme: Scheme | None, n: int, k: int, m: int) -> float:
    """Returns the bytes of the weight, x [m, k] and y [m, n], each read or written once."""
    of_x = ACTIVATION_BYTES if scheme is None or scheme.activation is None else scheme.activation.bits / 8
    return weight_bytes(scheme, n, k) + m * (of_x * k + ACTIVATION_BYTES * n)


def memory_us(scheme: Scheme | None, n: int, k: int, m: int, ceilings: Ceilings) -> float:
    """Returns the microseconds for the problem's bytes at the measured read bandwidth."""
    return 1e6 * problem_bytes(scheme, n, k, m) / ceilings.read_bytes_per_s


def compute_us(n: int, k: int, m: int, ceilings: Ceilings, scheme: Scheme | None = None) -> float:
    """Returns the microseconds for the problem's 2 m n k operations at the measured fp16 rate, or twice that rate if x has 8
    bits.
    """
    rate = ceilings.fp16_flops * (1 if scheme is None or scheme.activation is None else 2)
    return 1e6 * 2.0 * m * n * k / rate


def ideal_speedup(scheme: Scheme, n: int, k: int, m: int, ceilings: Ceilings) -> float:
    """Returns the ratio of the 16-bit product's limit to this scheme's limit: about 16/bits for small m, falling to 1.

    With 8-bit x it falls to 2, the ratio of the tensor-core rates.
    """
    wide, own = compute_us(n, k, m, ceilings), compute_us(n, k, m, ceilings, scheme)
    return max(memory_us(None, n, k, m, ceilings), wide) / max(memory_us(scheme, n, k, m, ceilings), own)
