"""The epilogue's description. Its two implementations are tested in test_small_m_epilogue.py and test_large_m_epilogue.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue, activated, gate_times_up
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


def test_clamped_swiglu_is_that_of_gpt_oss():
    generator = torch.Generator().manual_seed(0)
    gate, up = 8 * torch.randn(2, 4001, generator=generator, dtype=torch.float64)
    gate[:2], up[1:3] = torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, -torch.inf])
    gl = SimpleNamespace(exp=torch.exp, rsqrt=torch.rsqrt, where=torch.where)
    names = {"gl": gl, "CLAMP": torch.tensor(7.0, dtype=torch.float64)}
    made = plain(gate_times_up, **names)(gate, up, SimpleNamespace(epilogue=SimpleNamespace(gate="clamped_swiglu")))
    limited = gate.clamp(max=7)
    expected = (up.clamp(-7, 7) + 1) * limited * torch.sigmoid(1.702 * limited)
    assert expected[:2].isnan().all()
    torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
