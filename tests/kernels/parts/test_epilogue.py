"""The epilogue as data; its two implementations: test_small_m_epilogue.py, test_large_m_epilogue.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue, activated
from tests.kernels.parts.plain import plain


def test_a_residual_has_neither_norm_nor_gate():
    assert Epilogue(True, True).plain and not Epilogue(False, False, h_type="fp16").plain
    assert not Epilogue(False, False, norm_parts=1).plain and not Epilogue(False, False, gate="silu").plain
    for given in ({"norm_parts": 3}, {"gate": "silu"}):
        with pytest.raises(ValueError, match="no norm and no gate"):
            Epilogue(False, False, h_type="fp16", **given)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_are_those_of_models(gate):
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    gl = SimpleNamespace(exp=torch.exp, rsqrt=torch.rsqrt)
    made = plain(activated, gl=gl)(x, SimpleNamespace(epilogue=SimpleNamespace(gate=gate)))
    wanted = torch.nn.functional.silu(x) if gate == "silu" else torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-9)
