"""8-bit activations of other tools' files: codes, scales, layers and logits against the tools' own functions.

compressed-tensors runs here itself. It simulates: x and w are dequantized, rounded to x's type (by u at most) and multiplied by
torch; lowbit multiplies codes exactly and rounds once. From the same codes both differ by at most, with S = sum |x| |w|,

    (2 u + u^2) S       x and w rounded to their type (0 in float32, where u counts once each as well)
    K 2^-24 S           the order of sums in float32
    2 u |y|             the result rounded by each

The kernels of Transformers' 8-bit floats run on GPUs only: a few lines written from their source stand here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lowbit.checkpoint import CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import ActivationRule, int_format, parse_scheme
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.nn import QuantLinear
from lowbit.ops import quantize_activations
from lowbit.quantize import rtn
from tests.checkpoint.foreign import same

tool = pytest.importorskip(
    "compressed_tensors.quantization", reason="compares with compressed-tensors, which is not installed (lowbit[dev] has it)"
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize  # noqa: E402
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
IDS = torch.randint(0, 160, (2, 24), generator=torch.Generator().manual_seed(5))


def hard(dtype, k=256):
    """x [1, 40, k] of a dtype. It has zeros, ties, subnormals, huge numbers, rows of one sign and numbers of every power of
    two."""
    generator = torch.Generator().manual_seed(k)
    info = torch.finfo(dtype)
    x = torch.randn(40, k, generator=generator) * torch.logspace(-7, 4, 40)[:, None]
    x = x.clamp(info.min, info.max).to(dtype)
    steps = torch.arange(k) % 256 - 128
    x[0] = 0
    x[1], x[2], x[3] = steps / 2, steps, (steps + 0.5) * 0.0078125
    x[4] = (torch.linspace(-1, 1, k) * info.max).to(dtype)
    x[5] = torch.linspace(-1, 1, k).to(dtype) * (info.max / 2)
    x[6] = torch.randn(k, generator=generator).abs().to(dtype)
    x[7] = -x[6]
    x[8] = (torch.linspace(-1, 1, k) * info.smallest_normal * 2).to(dtype)
    x[9] = (torch.linspace(-1, 1, k) * info.smallest_normal / 8).to(dtype)
    x[10], x[11, ::2] = 3.0, -0.0
    return x[None]


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


ARGUMENTS = {
    "int8 tokens": {"num_bits": 8, "strategy": "token", "dynamic": True},
    "int8 tokens with zero points": {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": False},
    "int8 static": {"num_bits": 8, "strategy": "tensor"},
    "int8 static with a zero point": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    "fp8 tokens": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "fp8 groups": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    "fp8 static": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ARGUMENTS)
def test_codes_and_scales_are_the_tools_to_the_bit(what, dtype):
    args, x = tool.QuantizationArgs(**ARGUMENTS[what]), hard(dtype)
    name, code = ("fp8_e4m3", torch.float8_e4m3fn) if args.type == "float" else ("int8", torch.int8)
    options = {"group": args.group_size or 0, "symmetric": args.symmetric, "rule": "ct"}
    if args.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    else:
        scale = torch.tensor([0.0312345]).to(dtype)
        zero = None if args.symmetric else torch.tensor([-37], dtype=torch.int8)
        options["scale"] = scale.float()
        options["zero"] = None if zero is None else zero.int()
    codes = quantize(x, scale, zero, args, dtype=code)
    made = quantize_activations(x, name, **options)
    assert same(made.scale, scale.float().reshape(made.scale.shape))
    finite = made.scale.isfinite().expand(*x.shape[:-1], made.scale.shape[-1]).all(-1)
    infinite = args.dynamic and not args.symmetric  # row 4 has the least and the largest number of its dtype
    assert finite[0].tolist() == [row != 4 or not infinite for row in range(40)]
    assert torch.equal(bits(made.codes)[finite], bits(codes)[finite])
    if not args.symmetric and args.dynamic:
        assert torch.equal(made.zero[finite], zero.int()[finite])
    # The tool computes with the code times the scale, rounded to x's dtype.
    simulated = fake_quantize(x, scale, zero, args)
    spread = made.scale.repeat_interleave(args.group_size, -1) if args.group_size else made.scale
    centered = made.codes.float() - (0 if made.zero is None else made.zero.float())
    assert torch.equal((centered * spread).to(dtype)[finite], simulated[finite])


def finegrained(x, group):
    """kernels-community/finegrained-fp8, act_quant.py: s = max(max|x| / 448, 1e-12), y = x / s."""
    values = x.float().unflatten(-1, (-1, group))
    scale = (values.abs().amax(-1, keepdim=True) / torch.tensor(448.0)).maximum(torch.tensor(1e-12))
    return (values / scale).to(torch.float8_e4m3fn).flatten(-2), scale[..., 0]


def fbgemm(x, group):
    """FBGEMM's quantize.cu, dynamicQuantizeMatrixRowwise, scale_ub 1200: s = max(min(max|x|, 1200) / 448, 1 / (448 * 512))."""
    scale = x.float().abs().amax(-1, keepdim=True).minimum(torch.tensor(1200.0)) / torch.tensor(448.0)
    scale = scale.maximum(torch.tensor(1 / (448 * 512)))
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rule", "emulated", "group"), [("hf", finegrained, 128), ("hf", finegrained, 256), ("fb", fbgemm, 0)])
def test_floats_of_transformers(rule, emulated, group, dtype):
    x = hard(dtype)
    codes, scale = emulated(x, group)
    made = quantize_activations(x, "fp8_e4m3", group=group, rule=rule)
    assert same(made.scale, scale) and same(made.codes, codes)


def llama(dtype):
    """A Llama wide enough for blocks of 128, with weights far above the smallest numbers of fp16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=256, initializer_range=0.1, dtype=dtype,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def checkpoint(folder, scheme, dtype):
    """A compressed-tensors checkpoint of `llama`; its scales have the model's type, as the tool writes them."""
    model, parsed, entries = llama(dtype), parse_scheme(scheme), {}
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    with CheckpointWriter(folder / "own") as writer:
        for name, tensor in model.state_dict().items():
            layer = name.removesuffix(".weight")
            if layer not in linears:
                writer.add(name, tensor)
                continue
            q = rtn(tensor, parsed)
            q = replace(q, scale=q.scale.to(dtype))
            if parsed.static_activations:
                given = {"activation_scale": torch.tensor([0.03 + 0.001 * (len(entries) % 5)]).to(dtype).float()}
                if parsed.activation_zero:
                    given["activation_zero"] = torch.tensor([len(entries) - 7], dtype=torch.int32)
                q = q.with_input(**given)
            entries[layer] = LayerEntry.of(q)
            for suffix, part in layer_tensors(q).items():
                writer.add(f"{layer}.{suffix}", part)
        config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        writer.finish(config, Manifest(parsed, entries, ("lm_head",)))
    report = convert_checkpoint(folder / "own", folder / "tool", "compressed-tensors")
    assert report.notes == [] and len(report.layers) == 14
    return folder / "tool"


SCHEMES = ["w8a8_ct", "w8a8_az_ct", "w8a8_t_ct", "w8a8_t_az_ct", "w4a8_g32_ct", "w4a8_g32_z_az_ct", "w8e4m3a8e4m3_ct",
           "w8e4m3a8e4m3_t_ct", "w8e4m3a8e4m3_b128x128_ct"]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_and_logits_are_the_tools(tmp_path, monkeypatch, scheme, dtype):
    folder, parsed = checkpoint(tmp_path, scheme, dtype), parse_scheme(scheme)
    report = convert_checkpoint(folder, tmp_path / "back")
    assert set(report.layers.values()) == {scheme} and report.notes == []
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=dtype)
    seen = {}
    for name, module in theirs.named_modules():
        if name in report.layers:
            module.register_forward_hook(lambda _, args, y, name=name: seen.update({name: (args[0], y)}))
    logits = theirs(IDS).logits
    assert len(seen) == 14
    u = torch.finfo(dtype).eps / 2
    for name, (x, y) in seen.items():
        layer = ours.get_submodule(name)
        assert isinstance(layer, QuantLinear) and layer.scheme_name == scheme
        made = quantize_activations(x, **layer.quantization())
        spread = made.scale.repeat_interleave(128, -1)[..., : x.shape[-1]] if made.scale.shape[-1] > 1 else made.scale
        decoded = (made.codes.double() - (0 if made.zero is None else made.zero.double())) * spread.double()
        terms = decoded.abs() @ layer.quant_tensor().dequantize(torch.float64).abs().T
        bound = (2 * u + u * u + x.shape[-1] * 2.0**-24) * terms + 2 * u * y.double().abs() + 2.0**-24
        assert bool(((layer(x).double() - y.double()).abs() <= bound).all()), name
    # A number next to a tie may be rounded to the next code, and later layers amplify that. So the logits are compared, to the
    # bit, with the tool's own products of our codes. In float32, where such numbers are rare, they are also compared directly.
    if dtype == torch.float32:
        difference = distance(ours(IDS).logits, logits)
        assert difference < (1e-2 if parsed.activation == int_format(8) else 5e-2), difference
    with monkeypatch.context() as patch:
        patch.setattr(QuantLinear, "_multiply", simulated_product)
        assert torch.equal(ours(IDS).logits, logits)
        if parsed.activation == int_format(8) and not parsed.static_activations and not parsed.activation_zero:
            for name in report.layers:
                layer = ours.get_submodule(name)
                layer.scheme = replace(layer.scheme, rule=ActivationRule.OWN)
            assert distance(ours(IDS).logits, logits) > 2e-2, "by another rule it would show"


def distance(logits, reference):
    return float((logits.double() - reference.double()).norm() / reference.double().norm())


def simulated_product(self, x, bias):
    """The product as the tool simulates it: torch's product of x and w, each dequantized and rounded to x's type."""
    x = self.after_rotation(x) if isinstance(x, torch.Tensor) else x
    spread = x.scale.repeat_interleave(128, -1)[..., : x.shape[-1]] if x.scale.shape[-1] > 1 else x.scale
    values = ((x.codes.float() - (0 if x.zero is None else x.zero.float())) * spread).to(x.dtype)
    return torch.nn.functional.linear(values, self.quant_tensor().dequantize(x.dtype), bias)


def test_there_and_back_keeps_every_byte(tmp_path):
    for scheme in ("w8a8_az_ct", "w8a8_t_az_ct", "w8e4m3a8e4m3_t_ct", "w8e4m3a8e4m3_b128x128_ct"):
        folder = checkpoint(tmp_path / scheme, scheme, torch.bfloat16)
        convert_checkpoint(folder, tmp_path / scheme / "lowbit")
        convert_checkpoint(tmp_path / scheme / "lowbit", tmp_path / scheme / "back", "compressed-tensors")
        first, back = folder / "model.safetensors", tmp_path / scheme / "back" / "model.safetensors"
        assert first.read_bytes() == back.read_bytes()
        assert (folder / "config.json").read_text() == (tmp_path / scheme / "back" / "config.json").read_text()
