"""Other tools' files are loaded directly into a model. The result equals that of converting them to a folder and loading the
folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, LlamaForCausalLM
from typer.testing import CliRunner

import lowbit
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.cli.commands import app
from lowbit.cli.terminal import err, out
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.hf import LOADING_OVERHEAD_BYTES
from lowbit.models.load import check_checkpoint, load_causal
from lowbit.models.parallel import parallel_refusals
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn import QuantLinear
from lowbit.nn.packed import PackedWeight
from tests.checkpoint.foreign import DATA
from tests.memory import linux, peak_bytes
from tests.models.test_convert_checkpoint import GGUF_CONFIG, write_gguf
from tests.tiny import save_tiny, tiny_llama

IDS = torch.tensor([[5, 17, 60, 9, 33, 2, 80, 41]])
FOLDERS = sorted(p.name for p in DATA.iterdir() if (p / "config.json").exists() and "bitsandbytes" not in p.name)


def run(*arguments):
    out.width = err.width = 200
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def from_files(folder, **options):
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    return cls.from_pretrained(folder, **options)


def same_tensors(a, b):
    return a.keys() == b.keys() and all(t.dtype == b[n].dtype and torch.equal(t, b[n]) for n, t in a.items())


def stated(folder):
    """What config.json states about the layers, without the files' checksums, which `save_pretrained` does not write."""
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    return {key: value for key, value in found.items() if key not in ("files", "sha256")}


@torch.no_grad()
def check_same(source, target, dtype):
    """Asserts that loading `source` equals converting it into `target` and loading that; returns the model."""
    report = convert_checkpoint(source, target / "c")
    direct, files = lowbit.load(source, device="cpu", dtype=dtype), from_files(target / "c", dtype=dtype)
    assert type(direct) is type(files) and direct.name_or_path == str(source)
    packed = {n: m.scheme.name for n, m in direct.named_modules() if isinstance(m, PackedWeight)}
    tied = direct.config.quantization_config.tied or {}
    assert {n: s for n, s in packed.items() if n not in tied} == report.layers
    assert all(direct.get_submodule(n).weight_packed is direct.get_submodule(o).weight_packed for n, o in tied.items())
    assert same_tensors(direct.state_dict(), files.state_dict())
    assert direct.config.quantization_config.to_dict() == files.config.quantization_config.to_dict()
    if files.can_generate():
        assert direct.generation_config.to_dict() == files.generation_config.to_dict()
    assert direct.config.dtype == files.config.dtype and not direct.training
    assert {n: (t.dtype, t.device) for n, t in direct.named_buffers()} == {
        n: (t.dtype, t.device) for n, t in files.named_buffers()
    }
    assert torch.equal(direct(IDS).logits, files(IDS).logits)

    direct.save_pretrained(target / "saved")
    assert stated(target / "saved") == stated(target / "c")
    written = [load_file(target / name / "model.safetensors") for name in ("saved", "c")]
    plain = {tensor.dtype for name, tensor in written[1].items() if name.endswith("orm.weight")}
    assert same_tensors(*written) == (plain == {dtype})
    assert json.loads((target / "saved" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    again = from_files(target / "saved", dtype=dtype)
    assert same_tensors(again.state_dict(), files.state_dict())
    return direct


@pytest.mark.parametrize("name", FOLDERS)
def test_same_as_converted_files(name, tmp_path):
    (file,) = (DATA / name).glob("*.safetensors")
    norm = next(t for n, t in load_file(file).items() if n.endswith(("model.norm.weight", "ln_f.weight")))
    model = check_same(DATA / name, tmp_path, norm.dtype)
    assert any(isinstance(m, QuantLinear) for m in model.modules())


def test_same_as_converted_files_in_another_type(tmp_path):
    check_same(DATA / "gptq-gptqmodel-w4-act-order-v2", tmp_path, torch.bfloat16)


def test_gguf_file_and_folder(tmp_path):
    """Embedding and LM head are one quantized matrix; the tokenizer is in the file."""
    torch.manual_seed(0)
    (tmp_path / "g").mkdir()
    write_gguf(tmp_path / "g" / "m.gguf", LlamaForCausalLM(GGUF_CONFIG))
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    model = check_same(tmp_path / "g" / "m.gguf", tmp_path / "a", torch.float32)
    assert model.lm_head.weight_packed is model.model.embed_tokens.weight_packed
    assert torch.equal(check_same(tmp_path / "g", tmp_path / "b", torch.float32)(IDS).logits, model(IDS).logits)
    pipe = lowbit.pipeline(str(tmp_path / "g" / "m.gguf"), device="cpu")
    converted = lowbit.pipeline(str(tmp_path / "a" / "c"), device="cpu")
    assert pipe("a", max_new_tokens=4, do_sample=False) == converted("a", max_new_tokens=4, do_sample=False)


def test_a_gguf_file_that_is_not_there(tmp_path):
    """The path of a missing file is an error at once, not a name to look up on the hub."""
    with pytest.raises(CheckpointError, match="there is no such file"):
        lowbit.load(tmp_path / "no.gguf")


def test_gguf_without_quantized_tensors(tmp_path):
    write_gguf(tmp_path / "m.gguf", LlamaForCausalLM(GGUF_CONFIG), plain=True)
    with pytest.raises(CheckpointError, match="none of its tensors is quantized; load it with Transformers"):
        lowbit.load(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="none of its tensors is quantized"):
        convert_checkpoint(tmp_path / "m.gguf", tmp_path / "out", "lowbit")


@pytest.mark.parametrize("tool", ["gptq", "compressed-tensors"])
def test_a_quantized_head_of_its_own_is_not_tied_whatever_is_stated(tool, tmp_path):
    save_tiny(tmp_path / "fp16", tied=False)
    quantize_checkpoint(tmp_path / "fp16", tmp_path / "own", "w4a16_g16", skip=[])
    convert_checkpoint(tmp_path / "own", tmp_path / "theirs", tool)
    expected = lowbit.load(tmp_path / "theirs", device="cpu", dtype=torch.float32)(IDS).logits
    for folder in ("own", "theirs"):
        path = tmp_path / folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
        model = lowbit.load(tmp_path / folder, device="cpu", dtype=torch.float32)
        assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize(("tied", "bias"), [(True, True), (False, False)])
@pytest.mark.parametrize("tool", ["gptq", "awq", "compressed-tensors"])
def test_tied_untied_and_biases(tool, tied, bias, tmp_path):
    save_tiny(tmp_path / "fp16", tied=tied, bias=bias)
    quantize_checkpoint(tmp_path / "fp16", tmp_path / "own", "w4a16_g16_z" if tool == "awq" else "w4a16_g16")
    convert_checkpoint(tmp_path / "own", tmp_path / "theirs", tool)
    model = check_same(tmp_path / "theirs", tmp_path, torch.float16)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float16)
    assert torch.equal(model(IDS).logits, own(IDS).logits)


def test_names_of_older_releases_and_of_a_base_model(tmp_path):
    shutil.copytree(DATA / "awq-auto-round", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    save_file({n.removeprefix("model."): t for n, t in load_file(file).items()}, file, {"format": "pt"})
    base = check_same(tmp_path / "base", tmp_path, torch.float16)
    whole = lowbit.load(DATA / "awq-auto-round", device="cpu", dtype=torch.float16)
    assert same_tensors(base.state_dict(), whole.state_dict())


def test_other_architectures_than_language_models(tmp_path):
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}
    BertForMaskedLM(BertConfig(**small)).save_pretrained(tmp_path / "bert")
    quantize_checkpoint(tmp_path / "bert", tmp_path / "own", "w4a16_g32", skip=["decoder"])
    convert_checkpoint(tmp_path / "own", tmp_path / "gptq", "gptq")
    assert type(check_same(tmp_path / "gptq", tmp_path, torch.float32)) is BertForMaskedLM
    assert type(lowbit.load(tmp_path / "own", device="cpu")) is BertForMaskedLM
    with pytest.raises(CheckpointError, match="BertForMaskedLM, which has no causal language-model head"):
        load_causal(tmp_path / "gptq")


def test_what_convert_writes_has_checksums(tmp_path):
    convert_checkpoint(DATA / "awq-auto-round", tmp_path / "c")
    model = lowbit.load(tmp_path / "c", device="cpu", dtype=torch.float16, verify=True)
    assert same_tensors(
        model.state_dict(), lowbit.load(DATA / "awq-auto-round", device="cpu", dtype=torch.float16).state_dict()
    )
    shown = run("inspect", tmp_path / "c", "--check").stdout
    assert "1 file, " in shown and "SHA-256 as config.json states" in shown


def test_own_and_plain_folders(tmp_path):
    save_tiny(tmp_path / "fp16")
    quantize_checkpoint(tmp_path / "fp16", tmp_path / "own", "w8a16")
    own, plain = (lowbit.load(tmp_path / name, device="cpu", dtype=torch.float32) for name in ("own", "fp16"))
    rounded = lowbit.load(tmp_path / "fp16", scheme="w8a16", device="cpu", dtype=torch.float32)
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert same_tensors(own.state_dict(), rounded.state_dict())
    with pytest.raises(ValueError, match="is quantized already, to awq; leave out the scheme 'w8a16'"):
        lowbit.load(DATA / "awq-auto-round", scheme="w8a16")
    with pytest.raises(CheckpointError, match="states no checksums"):
        lowbit.load(DATA / "awq-auto-round", verify=True)


def edited(tmp_path, change, name="awq-auto-round"):
    shutil.copytree(DATA / name, tmp_path / "edited")
    file = tmp_path / "edited" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return tmp_path / "edited"


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"edited: no file has model\.norm\.weight, which LlamaForCausalLM needs"),
        (lambda t: t.update({"model.more.weight": torch.ones(3)}), r"LlamaForCausalLM has no place for model\.more\.weight"),
        (lambda t: t["model.norm.weight"].fill_(torch.inf), r"edited: model\.norm\.weight: 64 of 64 numbers are not finite"),
        (lambda t: t[f"{LAYER}.scales"].fill_(torch.nan), r"model\.safetensors: .*up_proj\.scales: some scales are not finite"),
        (lambda t: t.pop(f"{LAYER}.qzeros"), r"up_proj\.qzeros: missing"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65).half()}),
            r"edited: model\.norm\.weight is \[65\], by config\.json it is \[64\]",
        ),
        (
            lambda t: t.update({f"{LAYER}.bias": torch.ones(96).half()}),
            r"up_proj\.bias: Llama.* has no such bias, and it is not 0",
        ),
    ],
)
def test_what_is_wrong_is_named(change, message, tmp_path):
    folder = edited(tmp_path, change)
    for read in (lowbit.load, check_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            read(folder)


def test_layers_without_a_place_are_refused_before_any_is_read(tmp_path):
    def change(tensors):
        tensors.update({f"{LAYER}s.{s}": tensors.pop(f"{LAYER}.{s}") for s in ("qweight", "qzeros", "scales")})

    with pytest.raises(CheckpointError, match=r"no file has .*up_proj\.weight, which .* has no place for .*up_projs\.weight"):
        lowbit.load(edited(tmp_path, change))


def test_one_gpu_only():
    model = tiny_llama()
    model.config.distributed_config = type("Config", (), {"tp_size": 2, "tp_plan": "auto"})()
    (reason,) = parallel_refusals(model, None)
    assert "so does loading other tools' files" in reason and "lowbit convert" in reason


def test_weights_without_a_scheme_are_left_to_the_tool(tmp_path):
    """NF4 has no scheme in lowbit. So Transformers loads the model with bitsandbytes, or says that bitsandbytes is missing."""
    with pytest.raises(CheckpointError, match="bitsandbytes"):
        lowbit.load(DATA / "bitsandbytes-nf4-nested", device="cpu")


def test_commands_take_other_tools_folders(tmp_path):
    save_tiny(tmp_path / "fp16")
    quantize_checkpoint(tmp_path / "fp16", tmp_path / "own", "w4a16_g32")
    convert_checkpoint(tmp_path / "own", tmp_path / "gptq", "gptq")
    before = sorted(tmp_path.rglob("*"))
    answers = [
        json.loads(run("generate", tmp_path / n, "ab", "--max-new-tokens", "5", "--json", "-").stdout) for n in ("own", "gptq")
    ]
    assert answers[0] == answers[1]
    rows = json.loads(
        run("eval", tmp_path / "own", tmp_path / "gptq", "--window", "64", "--windows", "2", "--json", "-").stdout
    )["rows"]
    assert rows[0]["nll"] == rows[1]["nll"]
    result = run("inspect", tmp_path / "gptq", "--check", "--json", tmp_path / "i.json")
    assert result.exit_code == 0, result.stderr
    assert "as loaded from gptq files" in result.stdout and "not converted: lm_head" in result.stdout
    assert "every tensor has the layout of its tool" in result.stdout
    found, own = (
        json.loads((tmp_path / "i.json").read_text()),
        json.loads(run("inspect", tmp_path / "own", "--json", "-").stdout),
    )
    assert found["tool"] == "gptq" and found["other_bytes"] == own["other_bytes"]
    by_name = [{row["layer"]: row for row in value["layers"]} for value in (found, own)]
    assert by_name[0] == by_name[1]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "i.json"]), "nothing else is written"


def test_what_is_left_out_is_said(tmp_path, caplog):
    config = tmp_path / "edited" / "config.json"
    edited(tmp_path, lambda t: None, "compressed-tensors-fp8")
    value = json.loads(config.read_text())
    value["quantization_config"]["config_groups"]["group_0"]["input_activations"]["num_bits"] = 4
    config.write_text(json.dumps(value))
    lowbit.load(tmp_path / "edited", device="cpu")
    said = "edited: model.layers.0.mlp.down_proj and 6 more: activations stay in 16 bits, the files asked for fp4_e2m1"
    assert any(record.getMessage().endswith(said) for record in caplog.records)
    shown = run("inspect", tmp_path / "edited").stdout
    assert "w8e4m3a16_t" in shown and "activations stay in 16 bits, the files asked for fp4_e2m1" in shown


def test_suite_states_the_size_of_other_tools_models(tmp_path):
    save_tiny(tmp_path / "fp16")
    quantize_checkpoint(tmp_path / "fp16", tmp_path / "own", "w4a16_g32")
    convert_checkpoint(tmp_path / "own", tmp_path / "gptq", "gptq")
    done = run(
        "eval",
        tmp_path / "own",
        tmp_path / "gptq",
        "--suite",
        "text",
        "--out",
        tmp_path / "r",
        "--window",
        "64",
        "--windows",
        "2",
    )
    assert done.exit_code == 0, done.stderr
    own, gptq = (m["size"] for m in json.loads((tmp_path / "r" / "results.json").read_text())["models"])
    assert own["bits_per_weight"] == gptq["bits_per_weight"] and own["scheme"] == gptq["scheme"]
    with CheckpointReader(tmp_path / "gptq") as reader:
        assert gptq["bytes"] == sum(reader.get(n).nbytes for n in reader.names())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gptq-gptqmodel-w4-act-order-v2", "compressed-tensors-fp8", "compressed-tensors-w8a8-asym"])
def test_on_a_gpu(name):
    """Layers are loaded one by one onto the GPU in the form of the kernels; codes, scales and other tensors equal those on a
    CPU.
    """
    on_cpu = lowbit.load(DATA / name, device="cpu", dtype=torch.bfloat16)
    on_gpu = lowbit.load(DATA / name, device="cuda", dtype=torch.bfloat16)
    assert {p.device.type for p in on_gpu.parameters()} == {"cuda"}
    with torch.inference_mode():
        expected, found = on_cpu(IDS).logits.float(), on_gpu(IDS.cuda()).logits.float().cpu()
    assert (found - expected).norm() < 5e-2 * expected.norm()
    assert same_tensors({n: t.cpu() for n, t in on_gpu.state_dict().items()}, on_cpu.state_dict())


def test_progress(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("lowbit.progress.on_terminal", lambda: True)
    lowbit.load(DATA / "awq-auto-round", device="cpu", progress=True)
    assert "awq weights" in capfd.readouterr().err
    lowbit.load(DATA / "awq-auto-round", device="cpu")
    assert "awq weights" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def packed(large, tmp_path_factory):
    """The folder with a checkpoint in lowbit's format; tests write other folders beside it. Its largest layer takes 75 MB in
    float32."""
    root = tmp_path_factory.mktemp("packed")
    quantize_checkpoint(large, root / "own", "w4a16_g64")
    return root


@linux
@pytest.mark.parametrize("tool", ["own", "gptq", "compressed-tensors"])
def test_peak_memory_is_packed_size_plus_one_layer_plus_a_constant(tool, packed):
    if tool != "own":
        convert_checkpoint(packed / "own", packed / tool, tool)
    peak = peak_bytes(
        "import lowbit.models.load, transformers.models.llama.modeling_llama",
        "model = lowbit.load(sys.argv[1], device='cpu', dtype=torch.float16)",
        packed / tool,
    )
    with CheckpointReader(packed / "own") as reader:
        size = sum(info.end - info.begin for info in map(reader.info, reader.names()))
    layer = 9216 * 2048 * 4
    print(f"{tool}: peak {peak:,}, packed {size:,}, layer {layer:,}")
    assert peak < size + layer + LOADING_OVERHEAD_BYTES
