"""Layouts of rivals' weights, which weights rivals refuse, and the readings of clock and power. The rivals' kernels need a
GPU."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from benchmarks import gemm_rivals, peers
from benchmarks.protocol import Contender, blank_row
from benchmarks.request import make_request
from benchmarks.under_load import NOTHING, Monitor
from lowbit.formats import parse_scheme
from lowbit.quantize import rtn


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_neighbours_along_k(bits):
    codes = torch.randint(0, 1 << bits, (48, 64), dtype=torch.uint8)
    words, each = gemm_rivals.packed_along_k(codes, bits), 32 // bits
    assert words.shape == (64 // each, 48) and words.is_contiguous()
    unpacked = torch.stack([(words >> (bits * i)) & ((1 << bits) - 1) for i in range(each)], dim=1)
    assert torch.equal(unpacked.reshape(64, 48).T.to(torch.uint8), codes)


def test_scales_of_channels_are_in_the_order_of_accumulators():
    """32 channels are four tiles of 8; a thread of mma.sync holds two adjacent channels of each tile."""
    order = gemm_rivals.channel_scales(torch.arange(64.0)[:, None], torch.float32)
    assert order.shape == (1, 64) and order[0, :8].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert sorted(order[0].tolist()) == [*range(64)] and order[0, 32:].min() == 32


@pytest.mark.parametrize(
    ("peer", "scheme", "shape"),
    [
        *((peer, "w4a16_g128_z", (128, 256)) for peer in ("marlin", "machete", "bitsandbytes", "quack")),
        *((peer, "w6e3m2a16", (128, 256)) for peer in ("marlin", "machete", "bitsandbytes", "quack")),
        *(("machete", "w4a16_g64", (128, 256)), ("quack", "w8a16", (128, 256)), ("quack", "w4a16_pc", (128, 256))),
        *(("marlin", "w4a16_g128", (96, 256)), ("machete", "w4a16_g128", (64, 256)), ("quack", "w4a16_g64", (24, 256))),
    ],
)
def test_refusals_say_what_is_taken(peer, scheme, shape):
    request = make_request(scheme, "128x256", "1")
    with pytest.raises(ValueError, match=r"takes (int4|N a multiple)|measures quack"):
        peers.PEERS[peer].build(rtn(torch.randn(shape), scheme), request)


def test_shapes_of_models():
    request = make_request(shapes="llama-3-8b, 64x128")
    assert request.shapes == ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (64, 128))


def test_vllm_is_named_where_its_operators_are_missing():
    gemm_rivals.load_vllm.cache_clear()
    pytest.importorskip("torch")
    if gemm_rivals.importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError, match="pip install vllm"):
        gemm_rivals.marlin(rtn(torch.randn(128, 256), "w4a16_g128"), make_request("w4a16_g128", "128x256", "1"))


def test_rows_name_what_was_measured():
    row = blank_row("marlin", parse_scheme("w4a16_g128"), (128, 256), 1, "float16")
    assert {"tuned", "sm_clock_mhz", "power_w"} <= set(row)
    assert Contender.__dataclass_fields__["tuned"].default is False


def test_readings_are_of_the_time_of_a_replay():
    """A reading from before the call does not count. Without numbers, or without nvidia-smi, there is no reading."""
    code = "import time\nfor i in range(200): print(f'{1000 + i}, {500 + i}.5', flush=True); time.sleep(0.02)"
    monitor, calls = Monitor([sys.executable, "-c", code]), []
    while monitor.last is NOTHING:
        time.sleep(0.01)
    time.sleep(0.2)
    before = monitor.last
    reading = monitor.while_running(lambda: calls.append(time.sleep(0.002)))
    assert calls and reading.at > before.at and reading.sm_clock_mhz > before.sm_clock_mhz
    assert reading.power_w == reading.sm_clock_mhz - 500 + 0.5
    monitor.process.kill()
    silent = Monitor(
        [sys.executable, "-c", "import time\nfor i in range(99): print('[N/A], [N/A]', flush=True); time.sleep(0.02)"]
    )
    time.sleep(0.3)
    reading = silent.while_running(lambda: None)
    assert reading.sm_clock_mhz is None and reading.power_w is None
    silent.process.kill()
    assert Monitor(["no-such-nvidia-smi"]).while_running(lambda: None) is NOTHING


@pytest.mark.gpu
@pytest.mark.parametrize("peer", ["marlin", "machete", "bitsandbytes", "quack"])
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w4a16_pc", "w8a16"])
def test_rivals_multiply_right(peer, scheme):
    """Every kernel that an installed rival offers is compared with float64 as in a run."""
    from benchmarks.protocol import measured_rows

    pytest.importorskip(peers.PEERS[peer].module)
    request = make_request(scheme, "512x1024", "1,33", quick=True)
    for row in measured_rows(peer, peers.PEERS[peer].build, request):
        assert row["error"] is None or row["error"].startswith("ValueError"), row["error"]
