"""TMA descriptors in global memory are fenced before TMA reads them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import conv_inputs
from tests.kernels.parts.plain import GL, check_operands, plain


def test_a_descriptor_is_fetched_anew():
    said = []

    def asm(text, constraints, inputs, dtype, is_pure, pack):
        said.append((text, constraints, is_pure))

    names = SimpleNamespace(**vars(GL) | {"inline_asm_elementwise": asm, "int32": None})
    plain(conv_inputs.map_arrived, gl=names)(np.int64(4096), SimpleNamespace(threads=128, threads_layout=None))
    ((text, constraints, is_pure),) = said
    assert "fence.proxy.tensormap::generic.acquire.gpu [$1], 128;" in text and not is_pure
    check_operands(text, constraints)
