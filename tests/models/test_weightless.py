"""Models without weights have the modules, schemes and dtypes of the loaded ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowbit.checkpoint import CheckpointError
from lowbit.hardware.machine import GPUS
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.head import SCHEME
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.weightless import weightless_model
from lowbit.nn import QuantLinear
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import PackedExperts
from lowbit.nn.row_linear import RowLinear
from lowbit.ops.simulated_gpu import simulated_gpu
from tests.tiny import save_tiny, tiny_tokenizer
from tests.tiny_experts import tiny_experts


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints, by how their weights are stored."""
    root = tmp_path_factory.mktemp("stored")
    save_tiny(root / "plain", tied=False)
    save_tiny(root / "tied")
    tiny_experts("mixtral").save_pretrained(root / "experts")
    tiny_tokenizer().save_pretrained(root / "experts")
    quantize_checkpoint(root / "tied", root / "quantized", "w4a16_g16")
    quantize_checkpoint(root / "experts", root / "quantized-experts", "w4a16_g32")
    convert_checkpoint(root / "quantized", root / "gptq", "gptq")
    return root


def described(model) -> dict[str, tuple]:
    """The packed matrices of a model, and its other parameters in shape and dtype."""
    rows = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            rows[name] = (
                type(module).__name__,
                module.scheme,
                module.shape,
                module.weight_scale.dtype,
                module.input_transform.parts,
            )
        elif isinstance(module, PackedExperts):
            rows[name] = ("experts", module.scheme, module.shape, module.weight_scale.dtype)
        else:
            own = [(key, p.shape, p.dtype) for key, p in module.named_parameters(recurse=False)]
            rows.update({f"{name}.{key}": (shape, dtype) for key, shape, dtype in own})
    return rows


@pytest.mark.parametrize("name", ["plain", "tied", "experts", "quantized", "quantized-experts", "gptq"])
@pytest.mark.parametrize("scheme", [None, "w4a16_g32", "w8a16"])
def test_modules_are_those_of_the_loaded_model(folders, name, scheme):
    if scheme is not None and name in ("quantized", "quantized-experts", "gptq"):
        pytest.skip("these files have a scheme")
    loaded = load_causal(folders / name, scheme=scheme, device="cpu", dtype=torch.float16, head=SCHEME)
    for module in loaded.modules():
        if isinstance(module, QuantLinear):
            module.restore()
    with simulated_gpu(GPUS["a100"]) as device:
        model = weightless_model(folders / name, scheme, SCHEME)
        assert model.device == device and model.dtype == torch.float16 and not model.training
        packed = [module for module in model.modules() if isinstance(module, QuantLinear)]
        assert all(module.gpu_weight is not None for module in packed) and bool(packed) == (
            name[0] in "qg" or scheme is not None
        )
        found = described(model)
    expected = described(loaded)
    if isinstance(loaded.lm_head, RowLinear):  # on a CPU, a 16-bit head beside quantized layers is not quantized
        assert found.pop("lm_head")[1].name == SCHEME and expected.pop("lm_head.weight")
    assert found == expected
    assert all(parameter.is_meta for parameter in model.parameters()), "no weights"
    assert model.generation_config.eos_token_id == loaded.generation_config.eos_token_id


def test_ties_are_kept(folders):
    with simulated_gpu(GPUS["h200"]):
        plain, quantized = (weightless_model(folders / name, None, SCHEME) for name in ("tied", "quantized"))
        assert plain.lm_head.weight is plain.model.embed_tokens.weight
        assert quantized.lm_head.weight_scale is quantized.model.embed_tokens.weight_scale


def test_a_second_scheme_is_refused(folders):
    with (
        simulated_gpu(GPUS["h200"]),
        pytest.raises(ValueError, match="is quantized already, to w4a16_g16; leave out the scheme"),
    ):
        weightless_model(folders / "quantized", "w8a16", SCHEME)


def test_incomplete_files_are_refused(folders, tmp_path):
    (tmp_path / "config.json").write_text((folders / "plain" / "config.json").read_text())
    with simulated_gpu(GPUS["h200"]), pytest.raises(CheckpointError):
        weightless_model(tmp_path, "w8a16", SCHEME)
