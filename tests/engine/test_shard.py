"""Parts of models: put together they are the whole, as weights and as logits. Models that cannot be cut give the reason."""

from __future__ import annotations

import pytest
import torch
import transformers

from lowbit.engine.shard import ShardPlan
from lowbit.engine.shard_loading import ShardSource, load_shard
from lowbit.models.load import load_causal
from lowbit.nn import QuantLinear
from lowbit.nn.embedding import QuantEmbedding
from lowbit.quantize import rtn
from tests.engine.test_family import SIZES
from tests.tiny import eager_opt, tiny_llama, with_channels

CPU = torch.device("cpu")


def model_of(family="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def whole(plan, name, parts):
    """Puts the parts of all ranks together to the whole matrix."""
    cut = plan.cuts.get(name)
    if cut is None:
        return parts[0]
    if cut.kind == "columns":
        return torch.cat(parts, dim=1)
    if cut.kind == "vocabulary":
        return torch.cat(parts)[: SIZES["vocab_size"]]
    rows = torch.zeros(sum(total for total, _ in cut.parts), parts[0].shape[1])
    for rank, part in enumerate(parts):
        at = torch.cat([torch.arange(*each) for each in cut.ranges(rank, plan.ranks)])
        rows[at] = part
    return rows


@pytest.mark.parametrize("scheme", ["w4a16_g16", "w4a16_g32_z", "w6e3m2a16", "w8a16", "w8a8"])
@pytest.mark.parametrize(("family", "options"), [("Llama", {}), ("Phi3", {}), ("Qwen3", {"num_key_value_heads": 6})])
def test_quantized_parts_are_the_whole(family, options, scheme):
    """The parts of 2 ranks, and for Llama of 6, put together are the whole. With 2 KV heads and 6 ranks, three ranks share each
    head. Groups that a cut divides become smaller groups."""
    model = model_of(family, **options)
    for ranks in (2, 6) if family == "Llama" else (2,):
        if ranks == 6:
            model.config.intermediate_size = 48
            model = model_of(family, **options, intermediate_size=48)
        plan = ShardPlan.of(model, ranks)
        assert len(plan.cuts) == (4 if family == "Phi3" else 7) * SIZES["num_hidden_layers"] + 1
        for name in plan.cuts:
            q = rtn(model.get_submodule(name).weight.data, scheme)
            parts = [plan.weight(name, q, rank) for rank in range(ranks)]
            assert torch.equal(whole(plan, name, [part.dequantize() for part in parts]), q.dequantize()), name
            plain = [plan.plain(name, "weight", model.get_submodule(name).weight.data, rank) for rank in range(ranks)]
            assert torch.equal(whole(plan, name, plain), model.get_submodule(name).weight.data)


def test_fewer_kv_heads_than_ranks():
    plan = ShardPlan.of(model_of(intermediate_size=48), 6)
    cut = plan.cuts["model.layers.0.self_attn.k_proj"]
    assert [cut.ranges(rank, 6) for rank in range(6)] == 3 * [[(0, 10)]] + 3 * [[(10, 20)]]
    assert (plan.config.num_attention_heads, plan.config.num_key_value_heads, plan.config.head_dim) == (1, 1, 10)


@pytest.mark.parametrize(
    ("model", "ranks", "words"),
    [
        (lambda: model_of(), 4, "its 6 heads are no multiple of 4"),
        (lambda: model_of(num_key_value_heads=3), 2, "its 3 KV heads are neither a multiple nor a divisor of 2"),
        (lambda: model_of(intermediate_size=55), 2, "the width 55 of its MLP is no multiple of 2"),
        (lambda: model_of("Mixtral", num_local_experts=4), 2, "its experts are not cut"),
        (lambda: model_of("Olmoe", num_experts=4, num_experts_per_tok=2, head_dim=6), 2, "norms of Olmoe are of all heads"),
        (eager_opt, 2, "attention of OPT takes the width of all heads"),
        (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2)), 2, "not a GPT2LMHead"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_say_why(model, ranks, words):
    with pytest.raises(ValueError, match=words):
        ShardPlan.of(model(), ranks)


def test_weights_that_cannot_be_cut_say_why():
    model = model_of(intermediate_size=64)
    plan, down = ShardPlan.of(model, 2), "model.layers.0.mlp.down_proj"
    q = with_channels(rtn(model.get_submodule(down).weight.data, "w4a16_g16"), pre_quant_scale=None)
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj: its input channels are in another order \(act-order\)"):
        plan.weight(down, q, 0)
    rotated = rtn(model.get_submodule(down).weight.data, "w4a16_g16").with_input(hadamard=64)
    with pytest.raises(ValueError, match="down_proj cannot be computed by 2 ranks: inputs that are rotated in blocks of 64"):
        plan.weight(down, rotated, 0)


def test_input_transforms_are_cut_with_the_columns():
    """Factors of the input channels are cut with the columns. So is an order of columns, if the scales do not depend on it."""
    model = model_of(intermediate_size=64)
    plan, down = ShardPlan.of(model, 2), "model.layers.0.mlp.down_proj"
    for scheme, order in (("w4a16_g16", False), ("w8a16", True)):
        q = with_channels(rtn(model.get_submodule(down).weight.data, scheme), order=order)
        x = torch.randn(5, 64)
        parts = [
            QuantLinear.from_quant_tensor(plan.weight(down, q, rank))(x[:, 32 * rank : 32 * rank + 32]) for rank in range(2)
        ]
        torch.testing.assert_close(sum(parts), QuantLinear.from_quant_tensor(q)(x), rtol=1e-4, atol=1e-4)


def weights(model):
    """Returns quantized matrices as codes and scales, and other parameters as they are."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (QuantLinear, QuantEmbedding)):
            q = module.quant_tensor()
            found[name] = (q.codes, q.scale)
        else:
            found.update({f"{name}.{leaf}": p for leaf, p in module.named_parameters(recurse=False)})
    return found


@pytest.mark.parametrize("scheme", [None, "w8a16", "w4a16_g16"])
@pytest.mark.parametrize("tied", [True, False])
def test_loaded_parts(tmp_path, scheme, tied):
    """Parts are the same codes whether 16-bit files are quantized while loading, or a lowbit checkpoint is loaded."""
    tiny_llama(tied=tied, bias=True).save_pretrained(tmp_path / "plain")
    sources = [(tmp_path / "plain", scheme)]
    one = load_causal(tmp_path / "plain", scheme=scheme, device="cpu", dtype=torch.float32)
    if scheme is not None:
        one.save_pretrained(tmp_path / "quantized")
        sources.append((tmp_path / "quantized", None))
    expected, plan = weights(one), ShardPlan.of(tiny_llama(tied=tied, bias=True), 2)
    assert plan.tied == tied
    for folder, quantize in sources:
        opened = ShardSource(folder, 2, CPU, scheme=quantize, dtype=torch.float32)
        parts = [weights(load_shard(opened, rank, CPU)) for rank in range(2)]
        for name in ("model.layers.1.self_attn.o_proj", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.k_proj"):
            if scheme is None:
                own = [part[f"{name}.weight"] for part in parts]
                assert torch.equal(torch.cat(own, 1 if "o_proj" in name else 0), expected[f"{name}.weight"])
            else:
                own = [part[name][0] for part in parts]
                assert torch.equal(torch.cat(own, 1 if "o_proj" in name else 0), expected[name][0])
        head = torch.cat([part["lm_head.weight"] for part in parts])
        assert torch.equal(head, expected["model.embed_tokens.weight" if tied else "lm_head.weight"])
        narrow = ShardSource(folder, 2, CPU, scheme=quantize, dtype=torch.bfloat16)
        assert type(load_shard(narrow, 0, CPU).lm_head) is torch.nn.Linear, "no decode program takes a RowLinear"
        for part in parts:
            assert torch.equal(part["model.norm.weight"], expected["model.norm.weight"])
            assert torch.equal(part["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])
        biases = [part.get("model.layers.0.self_attn.o_proj.bias") for part in parts]
        assert biases[1] is None and (scheme is not None or biases[0] is not None)


def test_a_source_says_why_before_weights_are_read(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its 4 heads are no multiple of 3"):
        ShardSource(tmp_path, 3, CPU)
    load_causal(tmp_path, scheme="w8a16", device="cpu").save_pretrained(tmp_path / "q")
    with pytest.raises(ValueError, match="is quantized already, to w8a16"):
        ShardSource(tmp_path / "q", 2, CPU, scheme="w4a16_g16")
