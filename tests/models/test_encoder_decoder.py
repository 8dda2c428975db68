"""BART and T5, small and random: quantized on disk and while loading, loaded, called, and measured on summaries."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BartConfig, LongT5Config, SwitchTransformersConfig, T5Config
from typer.testing import CliRunner

import lowbit
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.cli.commands import app
from lowbit.eval.rouge import Document, summarize
from lowbit.models.hf import plan_for
from lowbit.models.load import check_checkpoint, load_causal
from lowbit.nn import QuantLinear
from lowbit.nn.packed import PackedWeight
from lowbit.pipeline import Pipeline, pipeline
from tests.tiny import tiny_tokenizer

TOKENS = dict(vocab_size=98, pad_token_id=2, bos_token_id=0, eos_token_id=1, decoder_start_token_id=1)
BART = BartConfig(
    **TOKENS, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, forced_eos_token_id=None,
)  # fmt: skip
T5 = T5Config(**TOKENS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
              task_specific_params={"summarization": {"prefix": "sum: "}})  # fmt: skip
LAYERS = 2 * 6 + 2 * 10
"""Number of linear layers that are quantized. Each attention has four; a decoder layer has two attentions. The MLP of BART has
two. That of T5 has three, of which Transformers keeps `wo` in float32."""
PROMPTS = ["the quick brown fox", "a dog", "jumps over the lazy dog."]


@pytest.fixture(scope="module", params=["bart", "t5"])
def source(request, tmp_path_factory):
    """A folder with a model whose answers depend on the whole prompt."""
    folder = tmp_path_factory.mktemp("source") / request.param
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config({"bart": BART, "t5": T5}[request.param])
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            few = 0.5 if "position" in name or "bias" in name else 0.3
            own = "embed" in name or "shared" in name or "bias" in name
            torch.nn.init.normal_(parameter, std=few if own else 4 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized") / source.name
    run("quantize", source, folder, "--scheme", "w6e3m2a16")
    return folder


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "250"})
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done


def dequantized(source, folder):
    """The 16-bit model with the weights that a quantized checkpoint holds, in float32."""
    model = AutoModelForSeq2SeqLM.from_pretrained(source, dtype=torch.float32)
    with CheckpointReader(folder) as reader, torch.no_grad():
        for name in reader.manifest.layers:
            model.get_submodule(name).weight.copy_(reader.layer(name).dequantize())
    return model.eval()


def test_encoder_decoder_and_cross_attention_are_quantized(source, quantized):
    with CheckpointReader(quantized) as reader:
        layers, kept = set(reader.manifest.layers), reader.manifest.modules_to_not_convert
        assert reader.manifest.scheme.name == "w6e3m2a16"
    assert len(layers) == LAYERS and check_checkpoint(quantized) == ()
    cross = "encoder_attn" if source.name == "bart" else "EncDecAttention"
    assert sum(cross in name for name in layers) == 8 and sum("encoder." in name for name in layers) == 12
    assert any(name.endswith(".wo") for name in kept) == (source.name == "t5") and "lm_head" in kept
    model = lowbit.load(quantized, dtype=torch.float32)
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedWeight)}
    assert packed == layers and all(isinstance(model.get_submodule(name), QuantLinear) for name in packed)


def test_logits_are_those_of_dequantized_weights(source, quantized):
    model, reference = lowbit.load(quantized, dtype=torch.float32), dequantized(source, quantized)
    ids, answer = torch.randint(3, 98, (2, 3, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits, expected = (m(input_ids=ids, decoder_input_ids=answer).logits for m in (model, reference))
        plain = AutoModelForSeq2SeqLM.from_pretrained(source)(input_ids=ids, decoder_input_ids=answer).logits
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (logits - plain).abs().max() > 1e-2 * expected.abs().max()


def test_generate_is_that_of_dequantized_weights(source, quantized):
    reference = dequantized(source, quantized)
    ids = tiny_tokenizer()(PROMPTS[0], return_tensors="pt").input_ids
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = reference.generate(ids, **options)
    assert torch.equal(lowbit.load(quantized, dtype=torch.float32).generate(ids, **options), expected)
    assert len(set(expected[0].tolist())) > 3
    while_loading = lowbit.load(source, scheme="w6e3m2a16", dtype=torch.float32)
    assert torch.equal(while_loading.generate(ids, **options), expected)


def test_saved_again_it_is_the_same(quantized, tmp_path):
    model = lowbit.load(quantized, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with CheckpointReader(quantized) as first, CheckpointReader(tmp_path) as second:
        assert first.manifest.layers == second.manifest.layers
        for name in first.manifest.layers:
            assert torch.equal(first.layer(name).codes, second.layer(name).codes)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model.generate(ids, max_new_tokens=8), plain.generate(ids, max_new_tokens=8))


def test_a_pipeline_answers_each_as_if_alone(source, quantized):
    pipe = pipeline(str(quantized), dtype=torch.float32)
    options = {"do_sample": False, "max_new_tokens": 12}
    together = pipe(PROMPTS, **options)
    assert [r.generated_text for r in together] == [pipe(prompt, **options)[0].generated_text for prompt in PROMPTS]
    assert len({r.generated_text for r in together}) > 1 and all(r.generated_length <= 12 for r in together)
    reference = dequantized(source, quantized)
    ids = pipe.tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    expected = reference.generate(ids, **options)[0, 1:]
    assert together[1].generated_text == pipe.tokenizer.decode(expected, skip_special_tokens=True)
    whole = together[0].generated_text
    (stopped,) = pipe(PROMPTS[0], stop=[whole[3:5]], **options)
    assert whole[3:5] and stopped.generated_text == whole[: whole.index(whole[3:5])]
    assert run("generate", quantized, PROMPTS[0], "--max-new-tokens", "3", "--json", "-").exit_code == 0
    with pytest.raises(ValueError, match="the engine cannot sample tokens as this model asks: it is an encoder-decoder"):
        list(pipe.stream("a"))


def test_beams_and_lengths_are_the_models_own(source, quantized):
    """Beams and lengths come from the model's generation config; a document's tokens do not count towards the length of the
    answer.
    """
    pipe = pipeline(str(quantized), dtype=torch.float32, max_length=20)
    own = pipe.model.generation_config
    own.num_beams, own.min_length = 3, 10
    ids = pipe.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    expected = pipe.model.generate(ids, max_new_tokens=12, do_sample=False)[0, 1:]
    (found,) = pipe(PROMPTS[0], do_sample=False, max_new_tokens=12)
    assert found.generated_text == pipe.tokenizer.decode(expected, skip_special_tokens=True)
    stop = found.generated_text[2:4]
    for stopped in pipe(PROMPTS, do_sample=False, max_new_tokens=12, stop=[stop]):  # with a stop string, another beam may win
        assert stop not in stopped.generated_text
    assert pipe("dog " * 15, do_sample=False, max_new_tokens=12)[0].generated_length >= 10


@pytest.mark.parametrize("kind", [LongT5Config, SwitchTransformersConfig])
def test_layers_whose_weight_a_model_reads_itself(kind, tmp_path):
    model = AutoModelForSeq2SeqLM.from_config(kind(**T5.to_diff_dict() | {"model_type": kind.model_type}))
    plan = plan_for(model, "w8a16", None, False)
    assert plan.linears and not [name for name in plan.linears if name.endswith(".wo")]


def test_summaries(source, quantized, monkeypatch):
    pytest.importorskip("rouge_score", reason="needs the extra lowbit[eval]")
    asked, call = [], Pipeline.__call__
    monkeypatch.setattr(Pipeline, "__call__", lambda self, prompts, **o: asked.extend(prompts) or call(self, prompts, **o))
    pipe = pipeline(str(quantized), dtype=torch.float32)
    result = summarize(pipe, [Document("dogs bark", "dogs"), Document("b" * 90, "b")], max_new_tokens=8)
    if source.name == "bart":
        assert asked == ["dogs bark", "b" * 64] and (result.documents, result.cut) == (2, 1)
    else:  # T5, whose positions are unlimited
        assert asked == ["sum: dogs bark", "sum: " + "b" * 90] and (result.documents, result.cut) == (2, 0)


def test_eval_measures_summaries_and_skips_the_rest(source, quantized, tmp_path):
    if importlib.util.find_spec("rouge_score") is None:
        pytest.skip("needs the extra lowbit[eval]")
    data = tmp_path / "data"
    data.mkdir()
    (data / "news.jsonl").write_text(json.dumps({"document": "dogs bark", "summary": "dogs"}))
    (data / "questions.jsonl").write_text(json.dumps({"question": "Which?", "choices": ["a", "b"], "answer": 0}))
    run("eval", quantized, "--reference", source, "--suite", data, "--out", tmp_path / "out")
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    for model in document["models"]:
        assert [f["metric"] for f in model["figures"]] == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
        assert [s["task"] for s in model["skipped"]] == ["opticks", "questions"]
        assert all("an encoder-decoder model is measured on summaries only" in s["reason"] for s in model["skipped"])
    assert document["models"][0]["size"]["bits_per_weight"] == 32  # the 16-bit model was saved in 32 bits
    bits = document["models"][1]["size"]["bits_per_weight"]
    assert 6 < bits < (7.5 if source.name == "bart" else 15)  # T5's `wo` counts in full


def test_float_zeros_8_bit_activations_and_rotated_inputs(source, tmp_path):
    ids = torch.arange(3, 20)[None]
    for scheme, *options in (("w4a16_g32_fz", "--method", "hqq"), ("w8a8",), ("w8a8_az", "--rotate-inputs", "*")):
        run("quantize", source, tmp_path / scheme, "--scheme", scheme, *options)
        assert lowbit.load(tmp_path / scheme).generate(ids, max_new_tokens=4).shape[1] > 1


def test_embeddings_too(source, tmp_path):
    if source.name == "bart":  # BART's embedding is a class of its own, which scales
        plan = run("quantize", source, tmp_path / "q", "--scheme", "w8a16", "--embeddings")
        assert "BartScaledWordEmbedding" in plan.stdout + plan.stderr
        return
    run("quantize", source, tmp_path / "q", "--scheme", "w8a16", "--embeddings")
    model, reference = lowbit.load(tmp_path / "q", dtype=torch.float32), dequantized(source, tmp_path / "q")
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        logits, expected = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (model, reference))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", "{source}", "{tmp}/q", "--scheme", "w4a16_g32", "--method", "gptq"),
        ("quantize", "{source}", "{tmp}/q", "--scheme", "w4a16_g32", "--method", "awq"),
        ("eval", "{source}", "--windows", "1"),
        ("recommend", "{source}", "--budget-gb", "1"),
    ],
    ids=["gptq", "awq", "perplexity", "recommend"],
)
def test_what_is_not_there_is_refused_with_words(source, tmp_path, arguments):
    done = run(*(a.format(source=source, tmp=tmp_path) for a in arguments), code=1)
    assert "an encoder-decoder, which does not continue a text" in done.stderr
    assert "measured on summaries" in done.stderr and not (tmp_path / "q").exists()


def test_rotation_is_refused(source, tmp_path):
    done = run("quantize", source, tmp_path / "q", "--scheme", "w4a16_g32", "--rotate", code=1)
    assert source.name in done.stderr.lower() and not (tmp_path / "q").exists()


def test_causal_loading_refuses_before_weights_are_read(source):
    with pytest.raises(CheckpointError, match="ConditionalGeneration, an encoder-decoder, which does not continue"):
        load_causal(source)
