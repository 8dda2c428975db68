from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.hardware import machine as module
from lowbit.hardware.arch import ARCHS, arch_for
from lowbit.hardware.machine import MACHINES, features_of, machine_of, typical_machine
from lowbit.hardware.mma import MMA_M16N8K16_F16, MMA_M16N8K32_S8, MMA_M16N8K64_S4, wgmma_f16
from lowbit.kernels.choose.gemm import candidates, choose
from lowbit.kernels.choose.tiles import GemmShape
from lowbit.ops import problem_on, why_slow
from lowbit.ops.quantize_activations import quantize_refusals


def test_rows_are_consistent():
    assert [machine.arch for machine in MACHINES] == list(ARCHS)
    for machine in MACHINES:
        arch = machine.arch
        assert arch.shared_per_block_bytes < arch.shared_per_sm_bytes
        assert (machine.peak_fp8 is not None) == ("mma_fp8" in arch.features)
        assert (machine.peak_fp16 < (machine.peak_int8 or 0)) == (arch.sm != 103)  # B300 has little int8 throughput
        assert ("wgmma" in arch.features) == (arch.sm == 90)
        assert machine.read_bytes < machine.bandwidth_bytes
        for atom, feature in (
            (MMA_M16N8K16_F16, "mma_f16"),
            (MMA_M16N8K32_S8, "mma_s8"),
            (MMA_M16N8K64_S4, "mma_s4"),
            (wgmma_f16(64), "wgmma"),
        ):
            if feature in arch.features:
                assert arch.sm >= atom.min_sm


def test_unknown_versions_list_the_known():
    assert typical_machine(90).product == "H200"
    with pytest.raises(ValueError, match=r"no row for sm_75; known: 80 \(A100"):
        typical_machine(75)
    with pytest.raises(ValueError, match="no row for sm_130; known: sm_80"):
        arch_for(130)


def gpu(monkeypatch, name, sm, **properties):
    """Makes torch report this GPU; no kernel runs on it."""
    described = SimpleNamespace(name=name, multi_processor_count=132, L2_cache_size=50 << 20, **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: described)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(sm, 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    module._machine_of.cache_clear()
    return described


@pytest.fixture(autouse=True)
def forget():
    yield
    module._machine_of.cache_clear()


def test_the_gpu_in_hand_is_asked(monkeypatch):
    """The properties of the present GPU count, not those of its architecture: an H100 PCIe is sm_90 like an H200, but has 114
    SMs and slower memory."""
    found = gpu(monkeypatch, "NVIDIA H100 PCIe", 90, memory_clock_rate=1593000, memory_bus_width=5120)
    found.multi_processor_count = 114
    machine = machine_of("cuda")
    assert (machine.product, machine.sm_count, machine.arch.sm) == ("H100 PCIe", 114, 90)
    assert machine.bandwidth_bytes == pytest.approx(2.039e12, rel=1e-3) and machine.measured_read_bytes is None
    assert machine.peak_fp16 == pytest.approx(989e12 * 114 / 132)


def test_a_product_with_a_row_keeps_what_was_measured_of_it(monkeypatch):
    found = gpu(monkeypatch, "NVIDIA H200", 90)
    found.L2_cache_size = 60 << 20
    assert machine_of("cuda:0") == replace(typical_machine(90), l2_bytes=60 << 20)


def test_a_build_that_does_not_tell_the_memory_clock(monkeypatch):
    found = gpu(monkeypatch, "NVIDIA H20", 90)
    found.multi_processor_count = 66
    assert machine_of("cuda").bandwidth_bytes == typical_machine(90).bandwidth_bytes / 2


def test_the_choice_of_tile_sees_the_number_of_sms():
    """One wave of tiles on 132 SMs is two waves on 66 SMs, and the cost model must reflect that. Measured tiles are used only
    on the GPU on which they were measured."""
    h200 = typical_machine(90)
    half = replace(h200, product="half", sm_count=66)
    shape = GemmShape(128, 6144, 4096, 4)
    assert candidates(shape, h200)[0].measured is not None
    assert all(row.measured is None for row in candidates(shape, half))
    costs = {row.tile: row.cost_us for row in candidates(shape, half)}
    assert all(costs[row.tile] >= row.cost_us for row in candidates(shape, h200))
    assert choose(shape, half) in costs


@pytest.mark.parametrize(("sm", "name"), [(75, "NVIDIA T4"), (88, "NVIDIA sm_88"), (130, "NVIDIA sm_130")])
def test_a_version_without_a_row_is_refused_before_anything_is_packed(monkeypatch, sm, name):
    gpu(monkeypatch, name, sm)
    words = f"is for sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_110, sm_120, sm_121; {name} is sm_{sm}"
    for scheme in ("w4a16_g128", "w8a8"):
        problem = problem_on(torch.device("cuda", sm), parse_scheme(scheme), 1, (64, 64), torch.float16)
        assert words in why_slow(problem)[0]
    assert words in quantize_refusals(parse_scheme("w8a8").activation, torch.float16, 64, "cuda")[0]
    assert not features_of("cuda")
