from __future__ import annotations

import pytest

from benchmarks.limits import Ceilings, compute_us, ideal_speedup, memory_us, problem_bytes, weight_bytes
from lowbit.formats import parse_scheme
from lowbit.tune.timing import copies_needed


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [  # by hand for N 8, K 256: codes + scales + zeros
        ("w4a16_g128", 8 * 256 // 2 + 8 * 2 * 2),
        ("w4a16_pc", 8 * 256 // 2 + 8 * 4),
        ("w3a16_g128", 768 + 8 * 2 * 2),
        ("w5e2m2a16", 8 * 160 + 8 * 4),
        ("w6e3m2a16", 8 * 192 + 8 * 4),
        ("w8a16", 8 * 256 + 8 * 4),
        ("w4a16_g128_z", 1024 + 8 * 2 * 2 + 8 * 2 * 0.5),
        ("w4a16_g128_fz", 1024 + 8 * 2 * 4),
    ],
)
def test_weight_bytes(scheme, expected):
    assert weight_bytes(parse_scheme(scheme), 8, 256) == expected


def test_limits_of_a_real_layer():
    """N 8192, K 28672 in int4 with groups of 128: 117.4 MB of codes, 3.7 MB of scales, 26.4 us at 4.58 TB/s."""
    scheme, ceilings = parse_scheme("w4a16_g128"), Ceilings(4.58e12, 750e12)
    assert problem_bytes(scheme, 8192, 28672, 1) == 117_440_512 + 3_670_016 + 2 * (28672 + 8192)
    assert memory_us(scheme, 8192, 28672, 1, ceilings) == pytest.approx(26.46, abs=0.01)
    assert problem_bytes(None, 8192, 28672, 0) == 2 * 8192 * 28672
    assert compute_us(8192, 8192, 8192, ceilings) == pytest.approx(1e6 * 2 * 8192**3 / 750e12)
    assert ideal_speedup(scheme, 8192, 28672, 1, ceilings) == pytest.approx(16 / 4.125, rel=1e-2)
    assert ideal_speedup(scheme, 8192, 28672, 4096, ceilings) == 1
    middle = [ideal_speedup(scheme, 8192, 28672, m, ceilings) for m in (1, 64, 128, 256)]
    assert middle == sorted(middle, reverse=True)


def test_copies_exceed_three_times_the_l2():
    l2 = 60 << 20
    assert copies_needed(32 << 20, l2) == 6
    assert copies_needed(1 << 30, l2) == 2
    assert copies_needed(7 << 30, l2) == 2
    for nbytes in (1 << 20, 50 << 20, 181 << 20):
        assert copies_needed(nbytes, l2) * nbytes >= 3 * l2
