"""A simulated GPU: tensors on it have no memory, and launches of operators are recorded."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowbit.hardware.machine import GPUS, features_of, machine_of, present_gpu
from lowbit.kernels.parts.launch import Address, recording
from lowbit.ops.elementwise import add_norm
from lowbit.ops.simulated_gpu import simulated_gpu


def test_tensors_are_on_the_gpu():
    with simulated_gpu(GPUS["h200"]) as device:
        for made in (
            torch.empty(3, 4, device=device),
            torch.zeros(3, 4).to(device),
            torch.zeros(3, 4).pin_memory().to(device, non_blocking=True),
            torch.zeros(3, 4).to("cuda"),
            torch.nn.Parameter(torch.ones(3, 4, device=str(device))),
            torch.zeros(3, 4, device=device)[1:] + 1,
        ):
            assert made.device == device and made.is_cuda and not made.is_meta
        assert torch.zeros(3).device.type == "cpu" and not torch.zeros(3).is_cuda
        assert torch.empty(3, device=device).is_meta is False
    assert made.device.type == "meta", "outside the context there is no such GPU"


def test_values_are_those_of_valid_data():
    with simulated_gpu(GPUS["h200"]) as device:
        x = torch.empty(5, device=device)
        assert bool(x.isfinite().all()) and float(x.sum()) == 0 and int(x.argmax()) == 0 and x.max().item() == 0
        assert x.isfinite().all().item() is True and torch.equal(x, x + 1)
        real = torch.tensor([1.0, float("nan")])
        assert not bool(real.isfinite().all()) and real[0].item() == 1, "real values are read"


def test_addresses():
    with simulated_gpu(GPUS["h200"]) as device:
        x = torch.empty(4, 12, dtype=torch.half, device=device)
        assert x.data_ptr() % 256 == 0 and x[1:].data_ptr() - x.data_ptr() == 24 and x[0].data_ptr() == x.data_ptr()
        assert torch.empty_like(x).data_ptr() != x.data_ptr()


@pytest.mark.parametrize("name", GPUS)
def test_the_machine_is_the_named_one(name):
    gpu, before = GPUS[name], torch.cuda.get_device_properties
    with simulated_gpu(gpu) as device:
        machine = machine_of(device)
        assert (machine.product, machine.arch.sm, machine.sm_count) == (gpu.product, gpu.sm, gpu.multi_processor_count)
        assert ("wgmma" in features_of(device)) == (gpu.sm == 90)
    assert torch.cuda.get_device_properties is before
    with simulated_gpu(GPUS["a100"]) as other:
        assert machine_of(other).product == "A100-SXM4-80GB", "machines are cached by device, and the devices differ"


def test_bandwidths():
    """The bandwidth follows from clock and bus width. The data sheets say 3.35, 0.864 and 1.79 TB/s."""
    with simulated_gpu(GPUS["h100"]) as device:
        assert machine_of(device).bandwidth_bytes == pytest.approx(3.35e12, rel=0.01)
    for name, bandwidth in (("l40s", 0.864e12), ("5090", 1.792e12)):
        assert 2e3 * GPUS[name].memory_clock_rate * GPUS[name].memory_bus_width / 8 == pytest.approx(bandwidth, rel=0.01)


def test_operators_run_as_on_the_gpu():
    """The CUDA implementation makes the output and launches its kernel with the arguments that a GPU would have."""
    with simulated_gpu(GPUS["h200"]) as device, recording() as kernels:
        h = torch.empty(5, 64, dtype=torch.half, device=device)
        gamma = torch.empty(65, dtype=torch.half, device=device)[1:]
        y = add_norm(h, None, gamma, 1e-6)
        assert y.shape == h.shape and y.device == device
    (kernel,) = kernels
    assert kernel.name == "norm_rows"
    addresses = [argument for argument in kernel.arguments if isinstance(argument, Address)]
    assert {each.address for each in addresses} == {0, 2} and {each.dtype for each in addresses} == {torch.half}


def test_cpu_tensors_have_their_own_implementation():
    h, gamma = torch.randn(5, 64), torch.ones(64)
    expected = add_norm(h.clone(), None, gamma, 1e-6)
    with simulated_gpu(GPUS["h200"]), recording() as kernels:
        assert torch.equal(add_norm(h.clone(), None, gamma, 1e-6), expected)
    assert kernels == []


@pytest.mark.gpu
def test_the_table_says_what_the_driver_says():
    """The table of GPUs must have the driver's numbers. Tiles depend on them, so with other numbers a kernels file would lack
    kernels."""
    here = present_gpu()
    known = next((gpu for gpu in GPUS.values() if gpu.product == here.product), None)
    if known is None:
        pytest.skip(f"{here.product} is not among the GPUs to compile for")
    assert (known.sm, known.multi_processor_count) == (here.sm, here.multi_processor_count)
    with simulated_gpu(known) as device:
        simulated = machine_of(device)
    assert simulated.bandwidth_bytes == pytest.approx(machine_of("cuda").bandwidth_bytes, rel=1e-3)
