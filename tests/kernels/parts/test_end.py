"""What follows a product in a decode step, as data; its two implementations: test_ring_end.py, test_tile_end.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.end import End, activated
from tests.kernels.parts.plain import plain


def test_a_residual_has_neither_norm_nor_gate():
    assert End(True, True).plain and not End(False, False, residual=True).plain
    assert not End(False, False, parts=1).plain and not End(False, False, gate="silu").plain
    for given in ({"parts": 3}, {"gate": "silu"}):
        with pytest.raises(ValueError, match="has no norm and no gate"):
            End(False, False, residual=True, **given)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_are_those_of_models(gate):
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    gl = SimpleNamespace(exp=torch.exp, rsqrt=torch.rsqrt)
    made = plain(activated, gl=gl)(x, SimpleNamespace(end=SimpleNamespace(gate=gate)))
    wanted = torch.nn.functional.silu(x) if gate == "silu" else torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(made, wanted, rtol=1e-9, atol=1e-9)
