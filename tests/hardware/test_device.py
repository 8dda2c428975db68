from __future__ import annotations

import pytest

from lowbit.hardware.device import DEVICES, device_for
from lowbit.hardware.mma import MMA_M16N8K16_F16, MMA_M16N8K32_S8, MMA_M16N8K64_S4, wgmma_f16


def test_rows_are_consistent():
    assert len({d.sm for d in DEVICES}) == len(DEVICES)
    for d in DEVICES:
        assert d.shared_per_block_bytes < d.shared_per_sm_bytes
        assert (d.peak_fp8 is not None) == ("mma_fp8" in d.features)
        assert d.peak_fp16 < (d.peak_int8 or 0)
        assert ("wgmma" in d.features) == (d.sm == 90)
        assert d.measured_read_bytes is None or d.measured_read_bytes < d.bandwidth_bytes
        for atom, feature in (
            (MMA_M16N8K16_F16, "mma_f16"),
            (MMA_M16N8K32_S8, "mma_s8"),
            (MMA_M16N8K64_S4, "mma_s4"),
            (wgmma_f16(64), "wgmma"),
        ):
            if feature in d.features:
                assert d.sm >= atom.min_sm


def test_unknown_versions_list_the_known():
    assert device_for(90).product == "H200 SXM"
    with pytest.raises(ValueError, match=r"no row for SM 75; known: 80 \(A100"):
        device_for(75)
