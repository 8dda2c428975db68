"""Exported C libraries: rounding and packing bit for bit, the choice for every M, every argument of launches, and products on a
GPU."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from lowbit.export import export_kernels
from lowbit.export.library import MOST_ROWS, SOURCES, _launch, forms_of
from lowbit.export.tables import Library, write_tables
from lowbit.formats import QuantTensor, parse_scheme, scale_shape
from lowbit.hardware.machine import GPUS, machine_of
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape
from lowbit.ops.simulated_gpu import simulated_gpu
from lowbit.pack.weight import FragmentWeight, kernel_group, scaling_of
from lowbit.quantize.rtn import rtn, scale_dtype

pytestmark = pytest.mark.skipif(
    not (shutil.which("make") and any(map(shutil.which, ("gcc", "clang")))), reason="needs make and a C compiler"
)

HERE = Path(__file__).parent
FORMS = {"channels": 0, "divided": 1, "groups": 1, "subnormal": 2}
"""Numbers of the forms in C. C stores group scales as "divided", where Python may also keep them unchanged ("groups")."""


def built(folder: Path, *targets: str) -> Path:
    # `make` must run as if it were not called from a `make` that runs the tests.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
    command = ["make", "-C", str(folder), *targets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    return folder


def opened(folder: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(folder / "liblowbit_kernels.so"))
    library.lowbit_message.restype = ctypes.c_char_p
    library.lowbit_weight_bytes.restype = ctypes.c_size_t
    return library


# ---- packing, which needs no kernels


def packing_library(folder: Path, scheme: str, shape: tuple[int, int], dtype: torch.dtype) -> ctypes.CDLL:
    """A library without kernels."""
    parsed = parse_scheme(scheme)
    shutil.copytree(SOURCES, folder)
    write_tables(Library(parsed, dtype, scale_dtype(parsed, stored=dtype), (shape,), (), (), []), folder)
    return opened(built(folder))


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def quantized_in_c(library, w: torch.Tensor, scheme: str) -> QuantTensor:
    parsed = parse_scheme(scheme)
    shape = scale_shape(parsed.granularity, tuple(w.shape))
    codes, scale = torch.empty(w.shape, dtype=torch.uint8), torch.full(shape, torch.nan)
    zero = torch.full(shape, torch.nan) if parsed.zero.value else None
    error = library.lowbit_quantize(pointer(w), *w.shape, pointer(codes), pointer(scale), pointer(zero))
    assert error == 0, library.lowbit_message()
    return QuantTensor(codes, scale, zero.to(torch.uint8) if parsed.zero.value == "z" else zero, parsed)


def packed_in_c(library, codes, scale, zero, shape) -> tuple[torch.Tensor, int]:
    size, form = library.lowbit_weight_bytes(*shape), ctypes.c_int(-1)
    packed = torch.full((size,), 0xA5, dtype=torch.uint8)
    # variables keep the memory alive that C reads
    kept = [None if t is None else t.float().contiguous() for t in (scale, zero)]
    given = [pointer(t) for t in kept]
    error = library.lowbit_pack(pointer(codes), *given, *shape, pointer(packed), ctypes.byref(form))
    assert error == 0, library.lowbit_message()
    return packed, form.value


def assert_packed(packed: torch.Tensor, form: int, q: QuantTensor) -> None:
    """C's bytes are the tensors of `FragmentWeight.pack`. Each starts at a multiple of 256 bytes, and zeros are between
    them."""
    kind = scaling_of(q)
    assert form == FORMS[kind]
    expected = FragmentWeight.pack(q, scaling="divided" if kind == "groups" else kind)
    rest, at = packed.clone(), 0
    for name in ("codes", "scale", "channel_scale"):
        tensor = getattr(expected, name)
        if tensor is None:
            continue
        data = tensor.contiguous().view(torch.uint8).flatten()
        assert torch.equal(packed[at : at + data.numel()], data), name
        rest[at : at + data.numel()] = 0
        at += -(-data.numel() // 256) * 256
    assert not rest.any()


def weights(n: int, k: int) -> torch.Tensor:
    """Normal weights with an outlier, rows of zeros, and rows of small and of large values."""
    w = torch.randn(n, k) * 0.03
    w[1], w[2], w[3] = 0, w[2] * 1e-3, w[3] * 300
    w[0, 5] = 1.5
    return w


SCHEMES = [
    ("w4a16_g128", (96, 512), torch.bfloat16),
    ("w4a16_g128", (33, 200), torch.float16),
    ("w4a16_pc", (48, 264), torch.bfloat16),
    ("w4a16_g64_z", (40, 320), torch.bfloat16),
    ("w4a16_g32_fz", (17, 160), torch.float16),
    ("w4a16_pc_z", (32, 136), torch.float16),
    ("w8a16", (64, 128), torch.bfloat16),
    ("w8a16_g32", (35, 72), torch.bfloat16),
    ("w3a16_g64", (64, 256), torch.float16),
    ("w2a16_g16_fz", (16, 128), torch.bfloat16),
    ("w5a16_g48", (50, 96), torch.float16),
    ("w7a16_g128", (16, 384), torch.bfloat16),
    ("w6e3m2a16", (48, 192), torch.bfloat16),
    ("w6e3m2a16_g64", (48, 200), torch.float16),
    ("w4e2m1a16_g32", (31, 128), torch.bfloat16),
    ("w8e4m3a16_b16x128", (40, 320), torch.bfloat16),
    ("w8e5m2a16_t", (24, 64), torch.float16),
    ("w5e2m2a16", (16, 64), torch.float16),
    ("w3e2m0a16_g32", (16, 96), torch.bfloat16),
]


@pytest.mark.parametrize(("scheme", "shape", "dtype"), SCHEMES, ids=lambda value: str(value).replace("torch.", ""))
def test_rounds_and_packs_as_lowbit_does(scheme, shape, dtype, tmp_path):
    library, parsed = packing_library(tmp_path / "c", scheme, shape, dtype), parse_scheme(scheme)
    w = weights(*shape)
    ours = quantized_in_c(library, w, scheme)
    # fp16 cannot hold the scales of rows of tiny weights as normal numbers. C keeps all their digits, so these rows are not
    # compared.
    of_rows = rtn(w, scheme, scale_type=scale_dtype(parsed, stored=dtype))
    normal = (of_rows.scale.float() >= 2.0**-14).expand(of_rows.scale.shape)
    assert torch.equal(ours.scale[normal], of_rows.scale.float()[normal])
    rows = normal.all(dim=1).repeat_interleave(parsed.granularity.block(shape)[0])[: shape[0]]
    assert torch.equal(ours.codes[rows], of_rows.codes[rows]) and rows.sum() >= min(shape[0] - 3, 13)
    if of_rows.zero is not None:
        assert torch.equal(ours.zero[normal], of_rows.zero.float()[normal])
    decoded = torch.full(shape, torch.nan)
    zero = None if ours.zero is None else ours.zero.float()
    assert library.lowbit_dequantize(pointer(ours.codes), pointer(ours.scale), pointer(zero), *shape, pointer(decoded)) == 0
    assert torch.equal(decoded[rows], of_rows.dequantize(torch.float32)[rows])
    packed, form = packed_in_c(library, ours.codes, ours.scale, ours.zero, shape)
    assert_packed(packed, form, as_stored(ours, parsed, dtype))


def as_stored(q: QuantTensor, parsed, dtype: torch.dtype) -> QuantTensor:
    """Returns the weight as the library stores it. Scales are in bf16 if the library stores bf16. Otherwise they are in
    float32, which `FragmentWeight.pack` rounds to fp16."""
    half = scale_dtype(parsed, stored=dtype)
    scale = q.scale.to(half) if half == torch.bfloat16 else q.scale
    zero = q.zero.to(scale.dtype) if parsed.zero.value == "fz" else q.zero
    return QuantTensor(q.codes, scale, zero, parsed)


@pytest.mark.parametrize("least", [2.0**-7, 2.0**-8, 2.0**-20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packs_scales_of_every_size(least, dtype, tmp_path):
    """Codes are packed as subnormal numbers, unless a scale is less than 2^-7 of its row's largest. Scales of zero do not
    count."""
    scheme, shape = "w4a16_g32", (48, 256)
    library, parsed = packing_library(tmp_path / "c", scheme, shape, dtype), parse_scheme(scheme)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    scale = torch.rand(48, 8).clamp(min=0.5) * 2.0 ** torch.randint(-30, 30, (48, 1))
    scale[7, 3] = scale[7].max() * least
    scale[9], scale[10, 2] = 0, 0
    packed, form = packed_in_c(library, codes, scale, None, shape)
    q = as_stored(QuantTensor(codes, scale, None, parsed), parsed, dtype)
    assert form == (2 if least == 2.0**-7 else 1)
    assert_packed(packed, form, q)


def test_refuses_what_is_no_weight(tmp_path):
    library = packing_library(tmp_path / "c", "w4a16_g32", (16, 64), torch.bfloat16)
    codes, scale = torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 2)
    packed, form = torch.empty(library.lowbit_weight_bytes(16, 64), dtype=torch.uint8), ctypes.c_int()

    def message(codes=codes, scale=scale, zero=None, shape=(16, 64)) -> str:
        given = (pointer(codes), pointer(scale), pointer(zero), *shape, pointer(packed), ctypes.byref(form))
        assert library.lowbit_pack(*given) != 0
        return library.lowbit_message().decode()

    wrong = codes.clone()
    wrong[3, 5] = 16
    assert message(codes=wrong) == "codes of w4a16_g32 are less than 16; the one in row 3, column 5 is 16"
    assert message(scale=torch.full((16, 2), torch.inf)) == "scales must be finite; number 0 is not"
    assert message(zero=scale) == "w4a16_g32 has no zero points"
    assert message(shape=(16, 128)) == "this library has no kernels for 16 x 128: export with --shape 16x128"
    assert library.lowbit_weight_bytes(16, 128) == 0
    w = torch.zeros(16, 64)
    w[2, 9] = torch.nan
    assert library.lowbit_quantize(pointer(w), 16, 64, pointer(codes), pointer(scale), None) != 0
    assert library.lowbit_message() == b"weights must be finite; the one in row 2, column 9 is not"


# ---- kernels

CASES = {
    "w4a16_g128": ((200, 264), torch.bfloat16, ("h100", "a100")),
    "w6e3m2a16": ((2560, 2560), torch.float16, ("h100",)),
    "w4a16_g64_z": ((1536, 1024), torch.bfloat16, ("a100",)),
}
"""Scheme -> (shape, dtype of x, GPUs) of a library. The first has two forms and tails. The second has two planes of codes, no
group scales, and stream-K. The third has zero points, and split-K on an A100."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that returns the folder of a library."""
    folders: dict[str, Path] = {}

    def folder(scheme: str) -> Path:
        if scheme not in folders:
            (shape, dtype, gpus), done = CASES[scheme], []
            target = tmp_path_factory.mktemp("export") / "library"
            products = [GPUS[name] for name in gpus]
            count = export_kernels(scheme, [shape], products, target, dtype=dtype, progress=lambda *at: done.append(at))
            cubins = [path.read_bytes() for path in (target / "cubins").iterdir()]
            assert count == len(cubins) and all(code.startswith(b"\x7fELF") for code in cubins)
            assert done[-1][0] == done[-1][1] >= count
            folders[scheme] = built(target)
        return folders[scheme]

    return folder


class ChosenLaunch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("tile", ctypes.c_char_p),
        ("grid", ctypes.c_int * 3),
        ("threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("sums", ctypes.c_size_t),
        ("counters", ctypes.c_size_t),
    ]


def python_launch(scheme, gpu, m):
    """Returns the launch of a product as Python makes it, in the last form of the scheme."""
    parsed, (shape, dtype, _) = parse_scheme(scheme), CASES[scheme]
    number, form = [*forms_of(parsed, dtype).items()][-1]
    with simulated_gpu(GPUS[gpu]) as device:
        machine = machine_of(device)
        tile = choose(GemmShape(m, *shape, parsed.weight.bits), machine)
        return _launch(parsed, GPUS[gpu], shape, number, form, m, tile, dtype, machine, device)


OF_EACH = [(scheme, gpu) for scheme, (_, _, gpus) in CASES.items() for gpu in gpus]


@pytest.mark.parametrize(("scheme", "gpu"), OF_EACH)
def test_chooses_as_lowbit_does_for_every_m(exported, scheme, gpu):
    library, launch, tiles = opened(exported(scheme)), ChosenLaunch(), set()
    parsed, product, (shape, dtype, _) = parse_scheme(scheme), GPUS[gpu].product.encode(), CASES[scheme]
    number = [*forms_of(parsed, dtype)][-1]
    with simulated_gpu(GPUS[gpu]) as device:
        machine = machine_of(device)
    for m in range(1, MOST_ROWS + 1):
        assert library.lowbit_choose(product, number, m, *shape, ctypes.byref(launch)) == 0
        tile = choose(GemmShape(m, *shape, parsed.weight.bits), machine)
        assert launch.tile.decode() == str(tile)
        # plans are compared for some m only, since a plan takes milliseconds
        if tile not in tiles or m % 89 == 0 or m == MOST_ROWS:
            plan = python_launch(scheme, gpu, m).plan
            assert (tuple(launch.grid), (launch.sums, launch.counters)) == (plan.launch.grid, plan.workspace), (m, tile)
        tiles.add(tile)
    assert scheme != "w6e3m2a16" or {0, 1, 2} <= {tile.splits for tile in tiles}
    assert scheme != "w4a16_g64_z" or {1, 2, 3} <= {tile.splits for tile in tiles}
    for wrong in ((b"L40S", number, 1), (product, number + 1, 1), (product, number, 0), (product, number, MOST_ROWS + 1)):
        assert library.lowbit_choose(*wrong, *shape, ctypes.byref(launch)) != 0


def attributes_of_kernel(cubin: bytes) -> bytes:
    """The section `.nv.info.NAME` of an ELF file of one kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * number) for number in range(count)]
    names_at = sections[names][4]
    (found,) = (section for section in sections if cubin.startswith(b".nv.info.", names_at + section[0]))
    return cubin[found[4] : found[4] + found[5]]


def sizes_of_parameters(folder: Path) -> dict[str, list[int]]:
    """Bytes of the parameters of each cubin, which nvdisasm or the driver reads from its section of attributes.

    An entry of KPARAM_INFO (0x17, of format 4 and 12 bytes) has the parameter's number in bytes 4 and 5, and its size in the
    upper 14 bits of the last word.
    """
    sizes = {}
    for path in (folder / "cubins").iterdir():
        found = {}
        for match in re.finditer(rb"\x04\x17\x0c\x00(.{12})", attributes_of_kernel(path.read_bytes()), re.DOTALL):
            _, number, _, word = struct.unpack("<IHHI", match[1])
            found[number] = word >> 18
        assert sorted(found) == [*range(len(found))] and found, path.name
        sizes[path.name] = [found[number] for number in sorted(found)]
    return sizes


def launched(folder: Path, tmp_path: Path, calls, gpu="h100", name=None, **environment) -> tuple[list, str, str]:
    """Runs launches.py; returns what the driver printed, the last error or "ok", and the GPU of the kernels."""
    driver = tmp_path / "driver"
    driver.mkdir(exist_ok=True)
    subprocess.run(
        [
            shutil.which("gcc") or "clang",
            "-shared",
            "-fPIC",
            "-o",
            driver / "libcuda.so.1",
            "-Wl,-soname,libcuda.so.1",
            HERE / "driver.c",
        ],
        check=True,
    )
    described = {"GPU_NAME": name or GPUS[gpu].name, "CAPABILITY": str(GPUS[gpu].sm)}
    done = subprocess.run(
        [sys.executable, HERE / "launches.py", folder, json.dumps({"cubins": sizes_of_parameters(folder), "calls": calls})],
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **described, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ended = next(number for number, line in enumerate(lines) if isinstance(line, str))
    return lines[:ended], lines[ended], (lines[ended + 1 :] or [""])[0]


Y, X, WEIGHT, WORKSPACE, STREAM = 0x10_0000_0000, 0x20_0000_0010, 0x30_0000_0100, 0x40_0000_0100, 77


def aligned(size: int) -> int:
    return -(-size // 256) * 256


def addresses_of(library, shape, parsed, y, x, counters) -> dict[str, int]:
    """Addresses by the names of parameters, for a weight that starts at WEIGHT."""
    n, k = shape
    scale = WEIGHT + aligned(-(-n // 16) * -(-k // 64) * 128 * parsed.weight.bits)
    group, pairs = kernel_group(parsed), 4 if parsed.zero.value else 2
    channel = scale + aligned(-(-n // 16) * -(-k // 128) * (128 // group) * 16 * pairs if group else 0)
    return {
        "y": y,
        "x": x,
        "w": WEIGHT,
        "scale": scale if group else WEIGHT,
        "channel_scale": channel,
        "arrived": WORKSPACE,
        "partial": WORKSPACE + counters,
    }


def expected_parameters(arguments, addresses) -> list[bytes]:
    """The parameters of a launch as Python passes them, with the addresses that the C program gave."""
    found = []
    for name, value in arguments.items():
        if name in addresses and value is not None:
            found.append(struct.pack("<Q", addresses[name]))
        elif "_desc" in name and value is not None:
            (rows, columns), (stride, _), size = value.shape, value.strides, value.base.dtype.itemsize
            width = value.layout.swizzle_byte_width
            kind, swizzle = (
                {torch.int32: 3, torch.float16: 6, torch.bfloat16: 9}[value.base.dtype],
                {0: 0, 32: 1, 64: 2, 128: 3}[width],
            )
            box = min(value.block_shape[1], width // size or columns)  # one copy is at most as wide as the swizzle
            encoded = (addresses[name[0]], kind, columns, rows, stride * size, box, value.block_shape[0], swizzle, *[0] * 8)
            found += [struct.pack("<16Q", *encoded), struct.pack("<2i2q", rows, columns, *value.strides)]
        elif isinstance(value, float):
            found.append(struct.pack("<f", value))
        elif isinstance(value, int):
            found.append(struct.pack("<i", value))
    return [*found, bytes(16)]


@pytest.mark.parametrize(("scheme", "gpu"), OF_EACH)
def test_launches_as_lowbit_does(exported, scheme, gpu, tmp_path):
    """Grid, threads, shared memory, overlap and every parameter are those of Python's launch."""
    ms, (shape, dtype, _), parsed = (
        (1, 2, 8, 13, 16, 17, 40, 64, 96, 200, 640, 1000, 2200, 4096),
        CASES[scheme],
        parse_scheme(scheme),
    )
    number, library, launch = [*forms_of(parsed, dtype)][-1], opened(exported(scheme)), ChosenLaunch()
    most = 0
    for m in range(1, MOST_ROWS + 1):
        library.lowbit_choose(GPUS[gpu].product.encode(), number, m, *shape, ctypes.byref(launch))
        most = max(most, launch.counters)
    calls = [(Y, X, WEIGHT, number, WORKSPACE, m, *shape, STREAM) for m in (*ms, 4096 + 70)]
    lines, ended, product = launched(exported(scheme), tmp_path, calls, gpu)
    assert ended == "ok" and product == GPUS[gpu].product
    bytes_needed = [line for line in lines if isinstance(line, int)]
    assert len(bytes_needed) == len(calls) and bytes_needed == sorted(bytes_needed), "a larger M needs no less memory"
    launches = [line for line in lines if isinstance(line, dict)]
    slices = [(m, Y, X) for m in (*ms, 4096)] + [(70, Y + 2 * 4096 * shape[0], X + 2 * 4096 * shape[1])]
    for line, (m, y, x) in zip(launches, slices, strict=True):
        of = python_launch(scheme, gpu, m)
        launcher, (sums, counters) = of.plan.launch, of.plan.workspace
        assert tuple(line["grid"]) == launcher.grid and line["stream"] == STREAM
        assert line["threads"] >= 32 * of.plan.config.warps and (line["limit"] == line["shared"] or line["shared"] <= 48 << 10)
        assert line["attributes"] == ([[6, 1]] if "launch_pdl" in launcher.options else [])
        assert counters <= most and aligned(4 * most) + 4 * sums <= max(bytes_needed)
        expected = expected_parameters(of.arguments, addresses_of(library, shape, parsed, y, x, aligned(4 * most)))
        assert b"".join(map(bytes.fromhex, line["parameters"])) == b"".join(expected), m


def test_finds_its_gpu_or_says_what_it_has(exported, tmp_path):
    exported, shape = exported("w4a16_g128"), CASES["w4a16_g128"][0]
    assert launched(exported, tmp_path, [], name="NVIDIA H100 PCIe")[1:] == ("ok", "H100 80GB HBM3")
    assert launched(exported, tmp_path, [], name="NVIDIA L40S", gpu="l40s")[1] == (
        "this library has no kernels for NVIDIA L40S (compute capability 8.9): export with --gpu"
    )
    assert (
        "cuCtxGetDevice" in (said := launched(exported, tmp_path, [], NO_CONTEXT="1")[1]) and "invalid device context" in said
    )
    call = (Y, X, WEIGHT, 2, WORKSPACE, 1, *shape, STREAM)
    for place, value, text in (
        (0, Y + 8, "multiples of 16 bytes"),
        (2, WEIGHT + 16, "at multiples of 256"),
        (3, 0, "has no form 0"),
        (5, -1, "M is at least 0"),
        (6, 64, "export with --shape 64x264"),
    ):
        wrong = [*call]
        wrong[place] = value
        assert text in launched(exported, tmp_path, [wrong])[1]


def test_the_driver_is_that_of_cuda(tmp_path):
    """Sizes, offsets and numbers in driver.h are those of cuda.h, which comes with Triton."""
    from triton.backends.nvidia import driver

    (include,) = driver.include_dirs
    header = (SOURCES / "driver.h").read_text()
    names = re.findall(r"^    (CU_\w+) =", header, re.MULTILINE)
    values = [
        *names,
        "sizeof(CUtensorMap)",
        "sizeof(CUlaunchAttribute)",
        "sizeof(CUlaunchConfig)",
        "offsetof(CUlaunchAttribute, value)",
        "offsetof(CUlaunchConfig, hStream)",
        "offsetof(CUlaunchConfig, attrs)",
        "offsetof(CUlaunchConfig, numAttrs)",
        "offsetof(CUlaunchConfig, sharedMemBytes)",
    ]
    printed = []
    for source, flags in ((f'"{SOURCES / "driver.h"}"', []), ("<cuda.h>", ["-I", include])):
        lines = "".join(f'    printf("%ld ", (long)({value}));\n' for value in values)
        (tmp_path / "sizes.c").write_text(
            f"#include <stddef.h>\n#include <stdio.h>\n#include {source}\nint main(void) {{\n{lines}}}\n"
        )
        subprocess.run([shutil.which("gcc") or "clang", *flags, "-o", tmp_path / "sizes", tmp_path / "sizes.c"], check=True)
        printed.append(subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout)
    assert printed[0] == printed[1] and len(names) == 8


def test_says_why_it_exports_nothing(tmp_path):
    for scheme, shape, text in (
        ("w8a8", (64, 64), "quantizes activations"),
        ("w4a16_g24", (64, 64), "multiples of 16"),
        ("w4a16_g64", (64, 100), "K a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=text):
            export_kernels(scheme, [shape], [GPUS["h100"]], tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        export_kernels("w4a16_g64", [(64, 64)], [GPUS["h100"]], tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_example_builds_and_says_that_it_needs_a_gpu(exported):
    exported = built(exported("w4a16_g128"), "example")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run([exported / "example"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("no GPU: libcuda.so.1 was not found")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("scheme", "shape", "dtype"),
    [
        ("w4a16_g128", (4096, 4096), torch.bfloat16),
        ("w6e3m2a16", (1000, 1096), torch.float16),
        ("w4a16_g64_z", (512, 1024), torch.bfloat16),
    ],
)
def test_multiplies_on_a_gpu(scheme, shape, dtype, tmp_path):
    """The example checks all its products against sums in double precision."""
    from lowbit.hardware.machine import present_gpu

    export_kernels(scheme, [shape], [present_gpu()], tmp_path / "library", dtype=dtype)
    done = subprocess.run([built(tmp_path / "library", "example") / "example"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 16 and np.all(["FAILED" not in line for line in done.stdout.splitlines()])
