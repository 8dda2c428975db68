"""Words of 4 pixels, in Triton's interpreter with the instructions written out; the instructions on a GPU; machine code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_triton

triton = pytest.importorskip("triton", reason="the part is written in Triton")
import triton.language as tl  # noqa: E402

from lowbit.kernels.parts import pixel_words  # noqa: E402
from lowbit.kernels.parts.pixel_words import MAGIC, bytes_of, dp4a, rounded, transposed, window_of  # noqa: E402


@triton.jit
def plain_dp4a(a, b, c):
    """What the instruction computes."""
    for i in tl.static_range(4):
        c = c + ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return c


@triton.jit
def plain_prmt(a, b, SELECTOR: tl.constexpr):
    """What the instruction computes for selectors without sign bits."""
    word = tl.zeros_like(a)
    for i in tl.static_range(4):
        at = (SELECTOR >> (4 * i)) & 15
        word = word | ((((b if at >= 4 else a) >> (8 * (at % 4))) & 255) << (8 * i))
    return word


def replace_instructions(*modules):
    """Puts what dp4a and prmt compute in place of them, as the interpreter cannot run them."""
    for module in (pixel_words, *modules):
        module.dp4a, module.prmt = plain_dp4a, plain_prmt


@triton.jit
def words_kernel(out, x, values, AT: tl.constexpr):
    """Stores transposed words of x, the window from byte AT, its dot product with the first word, and rounded bytes."""
    i = tl.arange(0, 128)
    a, b, c, d = tl.load(x + i), tl.load(x + 128 + i), tl.load(x + 256 + i), tl.load(x + 384 + i)
    words = transposed(a, b, c, d)
    window = window_of(words, 0, 1, AT)
    total = dp4a(window, a, tl.full(a.shape, MAGIC, tl.int32))
    tl.store(out + i, words[0])
    tl.store(out + 128 + i, words[3])
    tl.store(out + 256 + i, window)
    tl.store(out + 384 + i, total)
    code = rounded(tl.load(values + i), -128.0, 127.0)
    tl.store(out + 512 + i, bytes_of(code, words[1], words[2], code))


def check_words(on="cpu"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (4, 128), generator=generator, dtype=torch.int64).to(torch.int32)
    values = 200 * torch.randn(128, generator=generator)
    out = torch.zeros(5, 128, dtype=torch.int32, device=on)
    words_kernel[(1,)](out, x.to(on), values.to(on), 3, num_warps=4)
    got = out.cpu()
    pixels = torch.from_numpy(x.numpy().view(np.int8).reshape(4, 128, 4).copy())  # pixel, lane, channel
    words = pixels.permute(2, 1, 0).contiguous()  # channel, lane, pixel
    window = torch.cat((words[0][:, 3:], words[1][:, :3]), 1)
    assert torch.equal(got[0], words[0].view(torch.int32)[:, 0]) and torch.equal(got[1], words[3].view(torch.int32)[:, 0])
    assert torch.equal(got[2], window.contiguous().view(torch.int32)[:, 0])
    sums = (window.int() * pixels[0].int()).sum(1)
    assert torch.equal(got[3].view(torch.float32), sums + 1.5 * 2**23)
    codes = values.round().clamp(-128, 127).to(torch.int8)
    wanted = torch.stack((codes, words[1][:, 0], words[2][:, 0], codes), 1)
    assert torch.equal(got[4], wanted.view(torch.int32)[:, 0])


def check_without_a_gpu():
    import sys

    replace_instructions(sys.modules[__name__])
    check_words()


def test_words_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


@pytest.mark.gpu
def test_words_on_a_gpu():
    check_words("cuda")


def test_machine_code():
    """8 prmt transpose 4 words, one takes the window, 3 join bytes; one dp4a."""
    kernel = compile_triton(
        words_kernel, {"out": "*i32", "x": "*i32", "values": "*fp32"}, {"AT": 3}, ("out", "x", "values"), 4, 90
    )
    assert kernel.count("IDP.4A") == 1 and kernel.count("PRMT") == 12 and kernel.stack_bytes == 0
