"""Mixtures of experts: on disk, while loading and saved again, through Transformers' own forward."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lowbit import LowbitConfig
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.cli.commands import app
from lowbit.cli.terminal import out
from lowbit.eval.size import size_of
from lowbit.explain import explain, render
from lowbit.methods import Hqq
from lowbit.models.experts import ExpertReader, expert_sources
from lowbit.models.load import check_checkpoint, load_causal
from lowbit.models.names import TensorNames
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.skeleton import skeleton
from lowbit.nn import QuantExperts
from lowbit.nn.experts import expert_weights
from lowbit.quantize import hqq, rtn
from lowbit.recommend import recommend
from tests.memory import linux, peak_bytes
from tests.tiny_experts import MODELS, tiny_experts

IDS = torch.arange(40)[None]
LAYERS = {"deepseek_v2": 1, "glm4_moe": 1}
"""Numbers of decoder layers with experts, for models in which not all two have them."""


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def logits(model):
    with torch.inference_mode():
        return model(IDS).logits


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    """The folder of a 16-bit model, its tensors as Transformers writes them, and its model_type."""
    folder = tmp_path_factory.mktemp("experts") / request.param
    tiny_experts(request.param).save_pretrained(folder)
    return folder, request.param


@pytest.mark.parametrize("scheme", ["w4a16_g16", "w8a8"])
def test_on_disk_while_loading_and_saved_again(source, scheme, tmp_path):
    folder, name = source
    plan = quantize_checkpoint(folder, tmp_path / "disk", scheme)
    layers = LAYERS.get(name, 2)
    assert len(plan.experts) == 2 * layers and any("weights of experts" in line for line in plan.lines())
    routers = [row.name for row in plan.kept if row.name.endswith(("mlp.gate", "mlp.router"))]
    assert len(routers) == layers and all("router" in row.reason for row in plan.kept if row.name in routers)

    model = load(tmp_path / "disk")
    assert sum(isinstance(m, QuantExperts) for m in model.modules()) == layers
    in_memory = load(folder, quantization_config=LowbitConfig(scheme))
    assert same_state(in_memory, model)
    in_memory.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert same_state(again, model)
    expected = logits(model)
    assert torch.equal(logits(again), expected)
    for written in ("disk", "saved"):
        assert check_checkpoint(tmp_path / written) == ()
    tokens = model.generate(IDS[:, :8], max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 12)

    plain = again.dequantize()
    assert not any(isinstance(m, QuantExperts) for m in plain.modules())
    found = logits(plain)
    if scheme == "w4a16_g16":
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert (found - logits(load(folder))).abs().max() > 1e-2, "quantization changes the logits"


@pytest.mark.parametrize("method", ["mse", "hqq"])
def test_methods_without_data(method, tmp_path):
    tiny_experts("gpt_oss").save_pretrained(tmp_path / "m")
    scheme = "w4a16_g32_fz" if method == "hqq" else "w4a16_g32"
    options = {"method": Hqq()} if method == "hqq" else {"search": "mse"}
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", scheme, **options)
    name, weights = "model.layers.1.mlp.experts.gate_up_proj", load_file(tmp_path / "m" / "model.safetensors")
    with CheckpointReader(tmp_path / "q") as reader:
        found = reader.experts(name)
    for e in range(4):
        matrix = weights[name][e].T  # gpt-oss stores the transposed matrix
        expected = hqq(matrix, scheme) if method == "hqq" else rtn(matrix, scheme, search="mse")
        assert torch.equal(found.expert(e).codes, expected.codes) and torch.equal(found.scale[e], expected.scale)


def test_inputs_of_experts_are_rotated_on_request(tmp_path):
    tiny_experts("qwen3_moe").save_pretrained(tmp_path / "m")
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16", rotate_inputs=["down_proj"])
    with CheckpointReader(tmp_path / "q") as reader:
        entry = reader.manifest.layers["model.layers.0.mlp.experts.down_proj"]
        assert (entry.input_parts.hadamard, entry.experts, entry.shape) == (16, 8, (64, 48))
        rotated = reader.experts("model.layers.0.mlp.experts.down_proj")
    model = load(tmp_path / "q")
    original = load(tmp_path / "m").get_parameter("model.layers.0.mlp.experts.down_proj")
    torch.testing.assert_close(rotated.dequantize(), original.data, rtol=0.02, atol=0.005)
    expected = logits(model)
    torch.testing.assert_close(logits(model.dequantize()), expected, rtol=1e-3, atol=1e-3)


def test_one_tensor_of_all_experts_and_one_each_are_read_alike(tmp_path):
    """Some files have one tensor of all experts, as the parameter of the model. Others, and those that Transformers saves, have
    one tensor for each expert."""
    model = tiny_experts("mixtral")
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "fused")
    save_file(model.state_dict(), tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    own = model.state_dict()
    for kind in ("each", "fused"):
        names = TensorNames(skeleton(tmp_path / kind))
        with CheckpointReader(tmp_path / kind) as reader:
            weights = {n: (4, *t.shape[1:]) for n, t in own.items() if "experts" in n}
            sources = expert_sources(names, reader.names(), weights)
            assert sources.keys() == weights.keys()
            assert all(source.is_stacked == (kind == "each") for source in sources.values())
            for name, source in sources.items():
                read = ExpertReader(reader, source)
                assert all(torch.equal(read(e), own[name][e]) for e in range(4)) and read.stored == torch.float16
        quantize_checkpoint(tmp_path / kind, tmp_path / f"{kind}-q", "w4a16_g32")
    assert same_state(load(tmp_path / "each-q"), load(tmp_path / "fused-q"))
    assert torch.equal(logits(load(tmp_path / "each-q")), logits(load(tmp_path / "fused-q")))


def test_more_than_nine_experts_keep_their_order(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    _, config = MODELS["qwen3_moe"]
    config = Qwen3MoeConfig(**{**config().to_dict(), "num_experts": 12, "num_hidden_layers": 1})
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).half()
    model.save_pretrained(tmp_path / "m")
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16")
    name = "model.layers.0.mlp.experts.down_proj"
    with CheckpointReader(tmp_path / "q") as reader:
        found = reader.experts(name)
        assert all(torch.equal(found.expert(e).codes, rtn(w, "w8a16").codes) for e, w in enumerate(model.get_parameter(name)))


def test_a_release_without_experts_refuses_and_damaged_files_are_named(tmp_path):
    tiny_experts("mixtral").save_pretrained(tmp_path / "m")
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16")
    path = tmp_path / "q" / "config.json"
    config, name = json.loads(path.read_text()), "model.layers.0.mlp.experts.down_proj"
    stated = config["quantization_config"]["layers"]
    assert stated[name]["shape"] == [4, 64, 96], "a reader of [N, K] refuses three dimensions"
    with CheckpointReader(tmp_path / "q") as reader, pytest.raises(CheckpointError, match="weights of 4 experts"):
        reader.layer(name)

    def fails(change, message):
        changed = json.loads(json.dumps(config))
        change(changed["quantization_config"]["layers"])
        del changed["quantization_config"]["sha256"], changed["quantization_config"]["files"]
        path.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "q")

    fails(lambda layers: layers[name].update(shape=[5, 64, 96]), r"has torch.uint8 \(5, 64, 96\), the file has")
    fails(lambda layers: layers[name].update(order=True), "no file has .*down_proj.weight_order")
    fails(lambda layers: layers[name].update(low_rank=4), "the weights of experts have no low_rank")
    fails(lambda layers: layers.update({name: {"shape": [4, 0, 96]}}), r"or \[E, N, K\] for experts")
    fails(lambda layers: layers.update({"lm_head": layers.pop(name)}), "lm_head")


@linux
def test_quantizing_takes_the_memory_of_one_expert(tmp_path):
    """Besides a shard of the output, only one expert in 16 bits is in memory."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=160, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=10, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    model.to_empty(device="cpu").half()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    model.save_pretrained(tmp_path / "m")
    del model
    setup = "import lowbit, lowbit.models.quantize_checkpoint\nimport transformers.models.mixtral.modeling_mixtral"
    measured = "lowbit.quantize_checkpoint(sys.argv[1], sys.argv[2], 'w4a16_g64')"
    used = peak_bytes(setup, measured, tmp_path / "m", tmp_path / "q")
    stored = (tmp_path / "q" / "model.safetensors").stat().st_size
    whole = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert used < stored + 40_000_000 < whole, f"{used:,} bytes for a shard of {stored:,}; in 16 bits {whole:,}"


def test_commands_know_experts(tmp_path, monkeypatch):
    monkeypatch.setattr(out, "width", 200)
    tiny_experts("qwen3_moe").save_pretrained(tmp_path / "m")
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w4a16_g16")
    runner = CliRunner()
    result = runner.invoke(app, ["inspect", str(tmp_path / "q"), "--check", "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    assert "model.layers.0-1.mlp.experts.gate_up_proj" in result.stdout and "8 x 96 x 64" in result.stdout
    rows = json.loads((tmp_path / "r.json").read_text())["layers"]
    experts = [row for row in rows if row["experts"]]
    assert len(experts) == 4 and {row["experts"] for row in experts} == {8}
    total = sum(row["bytes"] for row in experts)
    assert f"weights of experts: {total:,} bytes, 8 experts a layer; a token reads those of 2, {total // 4:,} bytes" in (
        " ".join(result.stdout.split())
    )

    model = load_causal(tmp_path / "q")
    size, plain = size_of(str(tmp_path / "q"), model), size_of(str(tmp_path / "m"), load_causal(tmp_path / "m"))
    assert size.linear_weights == plain.linear_weights == 2 * (8 * 3 * 48 * 64 + 64 * 64 * 2 + 64 * 32 * 2)
    assert size.bits_per_weight == pytest.approx(5) and plain.bits_per_weight == 16

    found = recommend(tmp_path / "m", budget_bytes=1e9)
    assert found.linear_weights == size.linear_weights
    assert any(line.startswith("weights of experts: ") and "a token reads those of 2" in line for line in found.why)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_explain_follows_the_weight_of_an_expert(name, tmp_path):
    tiny_experts(name).save_pretrained(tmp_path / "m")
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w4a16_g32")
    part, expert, row, column = "model.layers.1.mlp.experts.gate_up_proj", 3, 70, 33
    with CheckpointReader(tmp_path / "q") as reader:
        q = reader.experts(part).expert(expert)
    layer = part.replace("experts.", f"experts.{expert}.")
    value, code = float(q.dequantize()[row, column]), int(q.codes[row, column])
    text = render(explain(tmp_path / "q", layer, row, column))
    assert f"expert {expert}: weight [{row}, {column}]" in text and f"code {code} = 0b{code:04b}" in text
    assert f"= {value:.9g}" in text and "lowbit/ops/experts.py  expert_mlp" in text
    assert "M 1: expert_ring_gemm (lowbit/kernels/sm80/expert_small_m_gemm.py)" in text and "not expert_wgmma_gemm: " in text
    assert "M 1: ring_gemm" not in text
    from_16_bit = render(explain(tmp_path / "m", layer, row, column, scheme="w4a16_g32"))
    assert f"= {value:.9g}" in from_16_bit and "lowbit/models/experts.py  ExpertReader" in from_16_bit
    assert ("w3.weight" in from_16_bit) == (name == "mixtral")
    with pytest.raises(ValueError, match="has 4 experts, 0 to 3, got 4"):
        explain(tmp_path / "q", part.replace("experts.", "experts.4."))


def test_a_router_that_is_a_linear_layer_stays_in_16_bits(tmp_path):
    from transformers import HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM

    config = HunYuanMoEV1Config(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=8, moe_topk=2, pad_token_id=0,
    )  # fmt: skip
    model = HunYuanMoEV1ForCausalLM(config)
    assert isinstance(model.model.layers[0].mlp.gate.wg, torch.nn.Linear)
    model.save_pretrained(tmp_path / "m")
    plan = quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16")
    routers = [row.name for row in plan.kept if row.reason == "a router, which chooses experts, is not quantized"]
    assert routers == [f"model.layers.{i}.mlp.gate.wg" for i in range(2)] and len(plan.experts) == 4
    assert logits(load(tmp_path / "q")).isfinite().all()


def test_an_architecture_is_recognised_by_the_interface_of_experts():
    for name in MODELS:
        model = tiny_experts(name)
        found = [weights for m in model.modules() if (weights := expert_weights(m)) is not None]
        assert len(found) == LAYERS.get(name, 2)
        assert {weights.transposed for weights in found} == {name == "gpt_oss"}
