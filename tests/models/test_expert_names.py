"""Names of experts in files and models, against the files that Transformers writes of each architecture."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from lowbit.models.expert_names import expert_modules, tensors_of
from tests.models.mixtures import MIXTURES, tiny_mixture


@pytest.mark.parametrize("name", MIXTURES)
def test_both_ways(name, tmp_path):
    """`tensors_of` predicts the names in Transformers' files. Each tensor has the rows of its expert."""
    model = tiny_mixture(name)
    model.save_pretrained(tmp_path)
    files, own = load_file(tmp_path / "model.safetensors"), model.state_dict()
    modules = expert_modules(model)
    assert len(modules) == (1 if name in ("deepseek_v2", "glm4_moe") else 2)
    named = {}
    for module in modules.values():
        named |= tensors_of(model, module)
        for parameter in module.parameters:
            canonical = module.canonical(parameter, own[parameter])
            assert torch.equal(module.stored(parameter, canonical), own[parameter])
    assert set(named) == {n for n in files if ".experts." in n and "shared" not in n}
    for tensor, (parameter, expert, role) in named.items():
        module = modules[parameter.rpartition(".")[0]]
        value = module.canonical(parameter, own[parameter])
        if expert is None:
            assert torch.equal(module.canonical(parameter, files[tensor]), value)
        else:
            rows = value[expert] if role == "down" else value[expert].chunk(2)[role == "up"]
            assert torch.equal(files[tensor], rows), tensor


def test_gpt_oss_computes_with_canonical_rows():
    """In canonical form, gate comes first and matrices are [N, K]. The experts compute what gpt-oss's own forward computes from
    alternating columns."""
    model = tiny_mixture("gpt_oss")
    (name, module), *_ = expert_modules(model).items()
    experts = model.get_submodule(name)
    x = torch.randn(5, 64)
    gate_up = module.canonical(module.first, experts.gate_up_proj.detach())
    bias = module.canonical(f"{module.first}_bias", experts.gate_up_proj_bias.detach())
    gate, up = (x @ gate_up[1].T + bias[1]).chunk(2, dim=1)
    theirs = x @ experts.gate_up_proj[1] + experts.gate_up_proj_bias[1]
    assert torch.allclose(gate, theirs[:, ::2], atol=1e-6) and torch.allclose(up, theirs[:, 1::2], atol=1e-6)
