"""Whole engines of vLLM on a CPU with checkpoints of ours: their greedy tokens are those of Transformers with our layers.

`make test-vllm` makes an environment with vLLM and runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit import demo
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from tests.forks import forked
from tests.vllm.folders import MIXED, SETTINGS, packed, plain

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make test-vllm)")

PROMPTS = [[5, 6, 7, 8], list(range(10, 40)), [3]]
NEW = 16

ENGINE = """
import json, sys
if __name__ == "__main__":
    folder, prompts, new, options = sys.argv[1], *map(json.loads, sys.argv[2:5])
    from vllm import LLM, SamplingParams
    from torch._dynamo.utils import counters
    sizes = dict(max_model_len=128, max_num_seqs=8, dtype="float32", enforce_eager=True, seed=0)
    engine = LLM(folder, **{**sizes, **options})
    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    graphs = dict(counters["stats"])
    made = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    alone = engine.generate([{"prompt_token_ids": prompts[0]}], greedy, use_tqdm=False)
    assert dict(counters["stats"]) == graphs, "something was compiled for a batch"
    tokens = [list(answer.outputs[0].token_ids) for answer in (*made, *alone)]
    print("TOKENS" + json.dumps(tokens), flush=True)
"""


def served(folder, prompts=PROMPTS, new=NEW, **options):
    """Tokens of vLLM, of all prompts together; the first prompt alone has to give the same."""
    settings = SETTINGS | {"VLLM_CACHE_ROOT": str(folder.parent / "cache")}
    out = forked(ENGINE, folder, json.dumps(prompts), json.dumps(new), json.dumps(options), imported=("vllm",), **settings)
    *tokens, alone = json.loads(next(line for line in out.splitlines() if line.startswith("TOKENS"))[6:])
    assert alone == tokens[0]
    return tokens


def ours(folder, prompts=PROMPTS, new=NEW, **options):
    """Tokens of Transformers' `generate` with our layers."""
    model, tokens = load_causal(folder, device="cpu", dtype=torch.float32, **options), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        model.generation_config.eos_token_id = None
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
        tokens.append(made[0, len(prompt) :].tolist())
    return tokens


def test_registered_as_often_as_vllm_likes():
    code = """
from lowbit.vllm import register
register(), register()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
print(QUANTIZATION_METHODS.count("lowbit"), get_quantization_config("lowbit").__name__)
"""
    assert forked(code, imported=("vllm",), **SETTINGS).splitlines()[-1] == "1 LowbitQuantization"


def test_mixed_bits_act_order_and_a_tied_embedding(tmp_path):
    folder = packed(
        tmp_path / "model", MIXED, tied=True, embedding="w8a16", order=("o_proj", "down_proj"), factors=("o_proj",),
        low_rank=("up_proj", "down_proj"),
    )  # fmt: skip
    assert served(folder) == ours(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks(tmp_path, tied):
    folder = packed(tmp_path / "model", MIXED, tied=tied, embedding="w8a16" if tied else None, order=("o_proj", "down_proj"))
    assert served(folder, tensor_parallel_size=2) == ours(folder)


@pytest.mark.parametrize(("scheme", "mode"), [("w4a16_g32", 3), ("w8a8", 2), ("w6e3m2a16", 3)])
def test_compiled_pieces_are_not_compiled_again(tmp_path, scheme, mode):
    """vLLM traces the model once for all batches, as a whole (2) or in pieces between attention, as on GPUs (3); in `served`
    the engine fails if anything is compiled after that."""
    folder = packed(tmp_path / "model", dict.fromkeys(MIXED, scheme), tied=True, embedding="w8a16")
    assert served(folder, enforce_eager=False, compilation_config={"mode": mode}) == ours(folder)


@pytest.mark.parametrize("scheme", ["w8e4m3a8e4m3", "w4a8_g128", "w8a8_az", "w4e2m1a16_g32", "w8a16_pc_z", "w2a16_g32_z"])
def test_schemes(tmp_path, scheme):
    folder = packed(tmp_path / "model", dict.fromkeys(MIXED, scheme))
    assert served(folder) == ours(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_16_bit_weights_are_quantized_while_loading(tmp_path, ranks):
    folder = plain(tmp_path / "model", tied=True)
    stated = {"quant_method": "lowbit", "scheme": "w4a16_g32", "head": "w8a16"}
    expected = ours(folder, scheme="w4a16_g32", head="w8a16")
    assert served(folder, hf_overrides={"quantization_config": stated}, tensor_parallel_size=ranks) == expected


def test_weights_of_a_shape_alone(tmp_path):
    """What benchmarks load: config.json and no weights."""
    folder = plain(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    stated = {"quant_method": "lowbit", "scheme": "w6e3m2a16"}
    tokens = served(folder, hf_overrides={"quantization_config": stated}, load_format="dummy")
    assert [len(each) for each in tokens] == [NEW] * 3


@pytest.mark.parametrize(("tool", "scheme"), [("awq", "w4a16_g32_z"), ("gptq", "w4a16_g32"), ("compressed-tensors", "w8a8_ct")])
def test_other_tools_checkpoints_run_on_our_kernels(tmp_path, tool, scheme):
    order = {"gptq": ("q_proj", "k_proj", "v_proj", "down_proj")}.get(tool, ())
    own = packed(tmp_path / "own", dict.fromkeys(MIXED, scheme), order=order)
    convert_checkpoint(own, tmp_path / "model", tool)
    assert served(tmp_path / "model", quantization="lowbit") == ours(own)


@pytest.mark.model
@pytest.mark.parametrize(("scheme", "embeddings"), [("w4a16_g64", False), ("w6e3m2a16", True)])
def test_the_demos_model(tmp_path, scheme, embeddings):
    folder = tmp_path / "model"
    try:
        source = demo.bring_model(print)
    except demo.DemoError as error:
        pytest.skip(str(error))
    quantize_checkpoint(source, folder, scheme, embeddings=embeddings)
    prompts = [[504, 3575, 282, 4649, 314], list(range(2000, 2050))]
    assert served(folder, prompts, 24) == ours(folder, prompts, 24)


def test_a_file_that_lacks_a_tensor_is_named(tmp_path):
    folder = packed(tmp_path / "model", MIXED)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        AssertionError, match="CheckpointError: the checkpoint's files lack model.layers.1.mlp.down_proj.weight_sc"
    ):
        served(folder)
