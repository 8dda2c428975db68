"""Calibrated quantization. Layers are calibrated on the inputs that they get in the quantized model. Folding factors changes no
result, killed runs are resumed, and every method writes a checkpoint that loads."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, OPTConfig, OPTForCausalLM

from lowbit import quantize_checkpoint
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.eval import sample_text
from lowbit.formats import parse_scheme
from lowbit.models import calibrate, scale_folding
from lowbit.models.calibrate import Calibration, FinishedLayers, unfinished_folder
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.quantize_layer import LayerQuantizer
from lowbit.models.scale_folding import ScaleFolder, input_scale
from lowbit.quantize import Awq, Gptq, Hqq, InputStatistics, Learned, Mixed, SmoothQuant, gptq, rtn
from lowbit.quantize.fold import divide_outputs, multiply_inputs
from lowbit.quantize.smoothquant import smoothing_scale
from tests.models.written import files
from tests.tiny import save_tiny, tiny_tokenizer

CALIBRATION = Calibration(samples=6, length=24, text=Path(__file__))  # any text will do, so this file is one
IDS = torch.arange(3, 43)[None]


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(ids).logits


def randomized(model):
    """Gives norms and biases values other than 1 and 0, so that a wrong fold changes the results."""
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(p)
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate") / "fp16"
    save_tiny(path, bias=True)
    randomized(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)).save_pretrained(path)
    return path


def decoder_of(path):
    return LayerwiseDecoder(CheckpointReader(path), "cpu", torch.float32)


def linears(decoder):
    return [n for n, m in decoder.layers[0].named_modules() if isinstance(m, torch.nn.Linear)]


@pytest.mark.parametrize("together", [1, 5])
def test_the_decoder_computes_what_the_model_does(together, tiny):
    decoder, tokens = decoder_of(tiny), CALIBRATION.tokens(tiny)
    hidden = decoder.embed(tokens, together=together)
    assert [len(x) for x in hidden] == [len(part) for part in tokens.split(together)]
    for i in range(len(decoder)):
        decoder.load(i)
        hidden = list(decoder.run(i, hidden))
        decoder.free(i)
        assert all(p.device.type == "meta" for p in decoder.layers[i].parameters()), "one layer at a time"
    model = load(tiny)
    with torch.inference_mode():
        expected = model.model(tokens).last_hidden_state
        torch.testing.assert_close(model.model.norm(torch.cat(hidden)), expected, rtol=1e-5, atol=1e-5)


def test_layers_that_read_one_input_are_found(tiny):
    decoder = decoder_of(tiny)
    hidden = decoder.embed(CALIBRATION.tokens(tiny))
    decoder.load(0)
    found = [(group.linears, group.producer) for group in decoder.inputs(0, hidden[0], linears(decoder))]
    assert found == [
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
        (("self_attn.o_proj",), None),
        (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
        (("mlp.down_proj",), None),
    ]


def test_gptq_is_truly_sequential(tiny, tmp_path):
    """The result equals GPTQ by hand in memory, with each layer's Hessian from a model whose earlier layers are already
    quantized.
    """
    quantize_checkpoint(tiny, tmp_path / "q", "w3a16_g16", method=Gptq(act_order=True), calibration=CALIBRATION)
    model, tokens = load(tiny), CALIBRATION.tokens(tiny)
    order = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)
    with CheckpointReader(tmp_path / "q") as reader:
        for layer in range(2):
            for group in order:
                chosen = {n: m for n, m in model.named_modules() if f".{layer}." in n and n.endswith(group)}
                seen = InputStatistics(next(iter(chosen.values())).in_features)
                hook = next(iter(chosen.values())).register_forward_pre_hook(lambda m, args, seen=seen: seen.add(args[0]))
                for row in tokens:
                    logits(model, row[None])
                hook.remove()
                for name, module in chosen.items():
                    q = gptq(module.weight.data, seen.hessian, "w3a16_g16", act_order=True)
                    got = reader.layer(name)
                    assert torch.equal(got.codes, q.codes) and torch.equal(
                        got.input_transform.order, q.input_transform.order
                    ), name
                    module.weight.data = q.dequantize()
    torch.testing.assert_close(logits(load(tmp_path / "q")), logits(model), rtol=1e-4, atol=1e-4)


METHODS = [
    (Gptq(), "w4a16_g32"),
    (Gptq(act_order=True), "w4a16_g32_z"),
    (Gptq(static_groups=True), "w6e3m2a16"),
    (Awq(), "w3a16_g32_z"),
    (Awq("loss"), "w3a16_g32_z"),
    (SmoothQuant(0.5), "w8a16"),
    (SmoothQuant(None), "w8a16"),
    (Hqq(), "w4a16_g32_fz"),
    (Learned(iterations=8, batch=4), "w3a16_g32"),
    (Learned(iterations=8, batch=4), "w6e3m2a16"),
]


@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_every_method_leaves_a_checkpoint_that_loads(method, scheme, tiny, tmp_path):
    plan = quantize_checkpoint(tiny, tmp_path / "a", scheme, method=method, calibration=CALIBRATION)
    quantize_checkpoint(tiny, tmp_path / "b", scheme, method=method, calibration=CALIBRATION)
    assert files(tmp_path / "a") == files(tmp_path / "b"), "the same seed gives the same files"
    assert len(plan.shapes) == 14 and sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    with CheckpointReader(tmp_path / "a") as reader:
        reader.check()
    difference = logits(load(tmp_path / "a")) - logits(load(tiny))
    assert difference.norm() < 0.35 * logits(load(tiny)).norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_every_method_on_a_gpu(method, scheme, tiny, tmp_path):
    for device in ("cpu", "cuda"):
        quantize_checkpoint(tiny, tmp_path / device, scheme, method=method, calibration=CALIBRATION, device=device)
    expected = logits(load(tiny))
    errors = {device: (logits(load(tmp_path / device)) - expected).norm() for device in ("cpu", "cuda")}
    assert errors["cuda"] < 1.2 * errors["cpu"] + 0.01 * expected.norm()


def test_embeddings_are_rounded_and_the_layers_know(tiny, tmp_path):
    quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g32", method=Gptq(), calibration=CALIBRATION, embeddings=True)
    quantize_checkpoint(tiny, tmp_path / "plain", "w4a16_g32", method=Gptq(), calibration=CALIBRATION)
    quantize_checkpoint(tiny, tmp_path / "rtn", "w4a16_g32", embeddings=True)
    with (
        CheckpointReader(tmp_path / "q") as q,
        CheckpointReader(tmp_path / "rtn") as r,
        CheckpointReader(tmp_path / "plain") as p,
    ):
        assert torch.equal(q.layer("model.embed_tokens").codes, r.layer("model.embed_tokens").codes)
        name = "model.layers.0.self_attn.q_proj"
        assert not torch.equal(q.layer(name).codes, p.layer(name).codes)


@pytest.mark.parametrize("smooth", [False, True], ids=["awq", "smoothquant"])
def test_folding_leaves_the_float_model_unchanged(smooth, tiny):
    """The methods' factors, folded into a float model with grouped-query attention, leave its logits in float32 unchanged."""
    model, decoder = load(tiny), decoder_of(tiny)
    expected = logits(model)
    hidden = decoder.embed(CALIBRATION.tokens(tiny))
    method, folder = SmoothQuant(0.7) if smooth else Awq(), ScaleFolder(decoder)
    factors = 0
    for i in range(len(decoder)):
        layer = decoder.load(i)
        groups = decoder.inputs(i, hidden[0], linears(decoder))
        folds = folder.find_folds(i, hidden[0], groups)
        assert [fold.producer for fold in folds] == [
            "input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj",
        ]  # fmt: skip
        assert folds[1].shared is not None, "two heads read one value head"
        seen = [InputStatistics(layer.get_submodule(g.linears[0]).in_features) for g in groups]
        decoder.observe(i, hidden, {g.linears[0]: s.add for g, s in zip(groups, seen, strict=True)})
        for group, fold, statistics in zip(groups, folds, seen, strict=True):
            weights = [layer.get_submodule(n).weight.data for n in group.linears]
            scale = input_scale(method, weights, [parse_scheme("w3a16_g16")] * len(weights), statistics, fold)
            if scale is None:
                continue
            factors += 1
            assert scale.max() / scale.min() > 1.2
            divide_outputs(model.get_submodule(f"model.layers.{i}.{fold.producer}"), fold.channels, scale, {})
            for n in group.linears:
                multiply_inputs(model.get_submodule(f"model.layers.{i}.{n}"), scale)
        hidden = list(decoder.run(i, hidden))
    assert factors >= 4
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_smoothing_by_hand(tiny, tmp_path):
    """The checkpoint's first factor is SmoothQuant's equation 4 on the layer's real inputs, computed in the type of the
    norm.
    """
    quantize_checkpoint(tiny, tmp_path / "q", "w8a16", method=SmoothQuant(0.5), calibration=CALIBRATION)
    model, largest = load(tiny), []
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_pre_hook(lambda m, args: largest.append(args[0].abs().amax((0, 1))))
    for row in CALIBRATION.tokens(tiny):
        logits(model, row[None])
    weights = [getattr(attention, n).weight.data for n in ("q_proj", "k_proj", "v_proj")]
    s = smoothing_scale(weights, torch.stack(largest).amax(0), 0.5)
    with CheckpointReader(tmp_path / "q") as reader:
        norm = reader.get("model.layers.0.input_layernorm.weight")
        assert norm.dtype == torch.float16
        torch.testing.assert_close(norm, (model.model.layers[0].input_layernorm.weight.data / s).half())


def test_awq_clips_when_asked(tiny, tmp_path, monkeypatch):
    """Without factors, AWQ rounds to nearest, with scales from the largest weight ("max") or from a search that may clip it
    ("loss").
    """
    monkeypatch.setattr(scale_folding, "search_scale", lambda *rest: None)
    for search in ("max", "loss"):
        quantize_checkpoint(tiny, tmp_path / search, "w3a16_g32", method=Awq(search), calibration=CALIBRATION)
    with CheckpointReader(tiny) as fp16, CheckpointReader(tmp_path / "max") as m, CheckpointReader(tmp_path / "loss") as loss:
        for name in m.manifest.layers:
            expected, cut = rtn(fp16.get(f"{name}.weight"), "w3a16_g32").scale, loss.layer(name).scale
            assert torch.equal(m.layer(name).scale, expected)
            assert bool((cut <= expected).all()) and bool((cut < expected).any())


def test_without_a_fold_the_factor_stays_with_the_layer(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(scale_folding, "_PAIRS", ())
    quantize_checkpoint(tiny, tmp_path / "q", "w3a16_g32", method=Awq(), calibration=CALIBRATION)
    with CheckpointReader(tmp_path / "q") as reader:
        layers = {name: reader.layer(name) for name in reader.manifest.layers}
        assert all(
            q.input_transform.pre_quant_scale is None
            for name, q in layers.items()
            if "o_proj" not in name and "down_proj" not in name
        )
        assert any(q.input_transform.pre_quant_scale is not None for q in layers.values())
    difference = logits(load(tmp_path / "q")) - logits(load(tiny))
    assert difference.norm() < 0.35 * logits(load(tiny)).norm()


def test_layers_left_in_16_bits_take_up_factors_too(tiny, tmp_path):
    """v_proj is left in 16 bits. It changes only by the factors of o_proj's inputs. The first decoder layer is skipped
    completely."""
    skip = ["v_proj", "model.layers.0.*", "lm_head"]
    quantize_checkpoint(tiny, tmp_path / "q", "w3a16_g32", method=Awq(), calibration=CALIBRATION, skip=skip)
    with CheckpointReader(tmp_path / "q") as q, CheckpointReader(tiny) as original:
        for name in ("weight", "bias"):
            tensor = f"model.layers.1.self_attn.v_proj.{name}"
            assert q.get(tensor).dtype == torch.float16 and not torch.equal(q.get(tensor), original.get(tensor))
            tensor = tensor.replace("layers.1", "layers.0")
            assert torch.equal(q.get(tensor), original.get(tensor))
        assert len(q.manifest.layers) == 6
    difference = logits(load(tmp_path / "q")) - logits(load(tiny))
    assert difference.norm() < 0.35 * logits(load(tiny)).norm()


def gemma(path):
    """Returns a Gemma. Its norms multiply by 1 + w, so that dividing w by factors would be wrong."""
    config = Gemma2Config(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, sliding_window=8, max_position_embeddings=64,
    )  # fmt: skip
    randomized(Gemma2ForCausalLM(config)).half().save_pretrained(path)


def opt(path):
    """Returns an OPT: norms with biases, biases in all layers, ReLU between fc1 and fc2, learned positions."""
    config = OPTConfig(
        vocab_size=160, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
        word_embed_proj_dim=64,
    )  # fmt: skip
    randomized(OPTForCausalLM(config)).half().save_pretrained(path)


@pytest.mark.parametrize(
    ("make", "producers"),
    [
        (gemma, [None, "self_attn.v_proj", None, "mlp.up_proj"]),
        (opt, ["self_attn_layer_norm", "self_attn.v_proj", "final_layer_norm", "fc1"]),
    ],
)
def test_other_families_fold_where_it_is_right(make, producers, tmp_path):
    make(tmp_path / "fp16")
    tiny_tokenizer().save_pretrained(tmp_path / "fp16")
    decoder = decoder_of(tmp_path / "fp16")
    hidden = decoder.embed(CALIBRATION.tokens(tmp_path / "fp16"))
    decoder.load(0)
    folds = ScaleFolder(decoder).find_folds(0, hidden[0], decoder.inputs(0, hidden[0], linears(decoder)))
    assert [fold and fold.producer for fold in folds] == producers
    for method in (Awq(), Gptq()):
        quantize_checkpoint(
            tmp_path / "fp16", tmp_path / "q", "w4a16_g32", method=method, calibration=CALIBRATION, overwrite=True
        )
        expected = logits(load(tmp_path / "fp16"))
        assert (logits(load(tmp_path / "q")) - expected).norm() < 0.35 * expected.norm()


@pytest.mark.parametrize("method", [Gptq(act_order=True), Awq(), Learned(8, 4)], ids=["gptq", "awq", "learned"])
def test_a_killed_run_goes_on_to_the_same_files(method, tiny, tmp_path, monkeypatch):
    quantize_checkpoint(tiny, tmp_path / "whole", "w4a16_g32", method=method, calibration=CALIBRATION)
    original, seen = LayerQuantizer.quantize, []

    def dies_in_layer_1(self, i, *rest):
        seen.append(i)
        if i == 1 and len(seen) == 2:
            raise KeyboardInterrupt
        return original(self, i, *rest)

    monkeypatch.setattr(LayerQuantizer, "quantize", dies_in_layer_1)
    target = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tiny, target, "w4a16_g32", method=method, calibration=CALIBRATION)
    assert not target.exists() and [p.name[:11] for p in unfinished_folder(target).glob("layer-*")] == ["layer-00000"]
    with pytest.raises(CheckpointError, match="finished layers of another run"):
        quantize_checkpoint(tiny, target, "w3a16_g32", method=method, calibration=CALIBRATION)
    quantize_checkpoint(tiny, target, "w4a16_g32", method=method, calibration=CALIBRATION)
    assert seen == [0, 1, 1], "the finished layer is not quantized again"
    assert files(target) == files(tmp_path / "whole") and not unfinished_folder(target).exists()


def test_a_full_disk_keeps_what_was_finished(tiny, tmp_path, monkeypatch):
    """A limit on file sizes, like a full disk, stops writing the second layer's file and, in a mixed run, the first inputs."""
    original, soft = calibrate.FinishedLayers.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self, i, result):
        if i == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, soft[1]))
        original(self, i, result)

    monkeypatch.setattr(calibrate.FinishedLayers, "write", limited)
    try:
        with pytest.raises(CheckpointError, match=r"layer-00001.* cannot be written .*the same command goes on"):
            quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g32", method=Gptq(), calibration=CALIBRATION)
        assert sorted(p.name[:11] for p in unfinished_folder(tmp_path / "q").iterdir()) == ["layer-00000", "recipe.json"]
        with pytest.raises(CheckpointError, match="inputs of a layer cannot be written"):
            quantize_checkpoint(tiny, tmp_path / "m", "w4a16_g32", calibration=CALIBRATION, mixed=Mixed(("w4a16_g32",), 8.0))
        assert not list(tmp_path.glob("*m*"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)


KILL = """
import os, sys, torch
from pathlib import Path
from lowbit.models import calibrate
from lowbit import quantize_checkpoint
from lowbit.quantize import Gptq
torch.set_num_threads(int(sys.argv[3]))
write = calibrate.FinishedLayers.write
def then_die(self, i, result):
    write(self, i, result)
    os.kill(os.getpid(), 9)
calibrate.FinishedLayers.write = then_die
calibration = calibrate.Calibration(6, 24, text=Path(sys.argv[4]))
quantize_checkpoint(sys.argv[1], sys.argv[2], "w4a16_g32", method=Gptq(), calibration=calibration)
"""


def test_a_process_that_is_killed_leaves_its_layers(tiny, tmp_path):
    """A run is killed with SIGKILL after the first layer; the next process resumes it and writes the files of an uninterrupted
    run.
    """
    command = [sys.executable, "-c", KILL, str(tiny), str(tmp_path / "q"), str(torch.get_num_threads()), __file__]
    root = Path(__file__).parent.parent.parent
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, check=False).returncode == -9
    assert not (tmp_path / "q").exists() and len(list(unfinished_folder(tmp_path / "q").glob("layer-*"))) == 1
    for name in ("q", "whole"):
        quantize_checkpoint(tiny, tmp_path / name, "w4a16_g32", method=Gptq(), calibration=CALIBRATION)
    assert files(tmp_path / "q") == files(tmp_path / "whole")


def test_mixed_bits_stay_within_the_budget(tiny, tmp_path, monkeypatch):
    said = []
    schemes = ("w3a16_g32", "w4a16_g32", "w8a16")
    quantize_checkpoint(
        tiny, tmp_path / "q", "w4a16_g32", method=Gptq(), calibration=CALIBRATION, mixed=Mixed(schemes, 5.2), say=said.append
    )
    with CheckpointReader(tmp_path / "q") as reader:
        layers = {name: reader.layer(name) for name in reader.manifest.layers}
        for i in (0, 1):
            for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
                assert len({layers[f"model.layers.{i}.{n}"].scheme for n in fused}) == 1
    assert not list(tmp_path.glob(".q*")), "nothing is left beside the target"
    bits = 8 * sum(q.nbytes for q in layers.values()) / sum(q.codes.numel() for q in layers.values())
    assert 4.6 < bits <= 5.2 and len({q.scheme for q in layers.values()}) > 1
    assert sum(line.split(":")[0] in schemes for line in said) == 8 and any("5.2 allowed" in line for line in said)
    logits(load(tmp_path / "q"))
    # the run is refused before it measures sensitivities
    monkeypatch.setattr("lowbit.models.quantize_checkpoint.measure_sensitivity", None)
    with pytest.raises(ValueError, match=r"take 3\.511 bits per weight, scales and corrections included, 2\.0 are allowed"):
        quantize_checkpoint(tiny, tmp_path / "r", "w4a16_g32", calibration=CALIBRATION, mixed=Mixed(schemes, 2.0))


def test_calibration_text(tiny, tmp_path):
    tokens = Calibration(5, 20, seed=1).tokens(tiny)
    assert tokens.shape == (5, 20) and torch.equal(tokens, Calibration(5, 20, seed=1).tokens(tiny))
    assert not torch.equal(tokens, Calibration(5, 20, seed=2).tokens(tiny))
    assert len(torch.unique(CALIBRATION.tokens(tiny), dim=0)) == 6, "pieces are drawn without overlap"
    (tmp_path / "a.txt").write_text("hello there " * 20)
    rows = [json.dumps({"text": "hello there " * 10}), "", json.dumps({"text": "hello there " * 10, "id": 1})]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert Calibration(text=tmp_path / "a.txt").read() == "hello there " * 20
    assert Calibration(text=tmp_path / "a.jsonl").read() == "hello there " * 10 + "\n\n" + "hello there " * 10
    with pytest.raises(ValueError, match=r"takes 128 x 512 tokens, .*a.txt has 240, enough for 0 pieces"):
        Calibration(text=tmp_path / "a.txt").tokens(tiny)
    (tmp_path / "a.jsonl").write_text('{"txt": 1}')
    with pytest.raises(ValueError, match=r'a.jsonl:1: a line of calibration text is a JSON object with a "text"'):
        Calibration(text=tmp_path / "a.jsonl").read()


def test_the_built_in_texts_of_calibration_and_evaluation_are_disjoint():
    """No sentence of the calibration text occurs in the evaluation text."""
    sentences = [s.strip() for s in Calibration().read().split(".") if len(s.strip()) > 40]
    text = " ".join(sample_text().split())
    assert len(sentences) > 1000 and not any(" ".join(s.split()) in text for s in sentences)


def test_weights_that_cannot_be_quantized_name_the_layer(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float16)
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.inf
    model.save_pretrained(tmp_path / "bad")
    tiny_tokenizer().save_pretrained(tmp_path / "bad")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: 1 of 11,264 numbers are not finite"):
        quantize_checkpoint(tmp_path / "bad", tmp_path / "q", "w4a16_g32", method=Gptq(), calibration=CALIBRATION)


def test_layers_that_no_recipe_explains_are_not_taken_over(tmp_path):
    """Layers of a run that was killed while it removed its files are not reused if their recipe is gone."""
    folder = unfinished_folder(tmp_path / "q")
    folder.mkdir()
    (folder / "layer-0.safetensors").write_bytes(b"of another run")
    FinishedLayers(tmp_path / "q", {"seed": 7})
    assert [path.name for path in folder.iterdir()] == ["recipe.json"]
