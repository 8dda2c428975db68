"""vLLM's engine on a GPU, compiled and with CUDA graphs, gives the probabilities and tokens of Transformers with lowbit layers:
of a dense model and of a mixture of experts. On two GPUs its probabilities are those of one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.ops.ranks import WITHOUT_MULTICAST
from tests.tiny import tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

VOCAB, NEW = 1000, 24
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts, new, options = sys.argv[1], *map(json.loads, sys.argv[2:])
engine = LLM(
    folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, max_num_seqs=8, cudagraph_capture_sizes=[1, 2, 8],
    kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.02, seed=0, **options,
)
asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, prompt_logprobs=0)
answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
print("ANSWERS" + json.dumps([
    {
        "logprobs": [next(iter(each.values())).logprob for each in answer.prompt_logprobs[1:]],
        "tokens": list(answer.outputs[0].token_ids),
    }
    for answer in answers
]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of two layers with one KV head for four q heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=512, dtype=torch.bfloat16, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return saved(LlamaForCausalLM, config, tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two layers of 16 experts, of which a token has 4, beside a shared expert, which vLLM computes on another stream."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=VOCAB, hidden_size=1024, moe_intermediate_size=512, shared_expert_intermediate_size=768, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=512, dtype=torch.bfloat16, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return saved(Qwen2MoeForCausalLM, config, tmp_path_factory.mktemp("vllm") / "mixture")


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """A model whose down_proj has K = 2,944: each of two GPUs gets 1,472 channels, which end inside a group of 128."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2944, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=512, dtype=torch.bfloat16, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return saved(LlamaForCausalLM, config, tmp_path_factory.mktemp("vllm") / "divided")


def saved(made, config, path):
    with torch.device("cuda"):
        model = made(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def answers(folder, prompts, new=NEW, **options):
    """What an engine answers."""
    return read(started(folder, prompts, new, **options))


def started(folder, prompts, new, **options):
    """Starts an engine in a process of its own."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(folder), json.dumps(prompts), json.dumps(new), json.dumps(options)],
        env=os.environ | settings | WITHOUT_MULTICAST, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def read(process):
    """Waits for the answers of an engine; ends its workers with it."""
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        end(process)
    assert process.returncode == 0, said[-6000:]
    return json.loads(next(line for line in said.splitlines() if line.startswith("ANSWERS")).removeprefix("ANSWERS"))


def end(process):
    """Ends an engine and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8a8", "fp8_dynamic", "w3a16_g64_z"])
def test_logits_and_tokens_on_a_gpu(folder, tmp_path, scheme):
    quantize_checkpoint(folder, tmp_path / "own", scheme)
    compare(tmp_path / "own", scheme)


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w3a16_g64_z", "w8a8", "fp8_dynamic"])
def test_logits_and_tokens_of_experts_on_a_gpu(mixture, tmp_path, scheme):
    quantize_checkpoint(mixture, tmp_path / "own", scheme)
    compare(tmp_path / "own", scheme)


@two_gpus
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8a8", "fp8_dynamic"])
def test_two_gpus_have_the_perplexity_of_one(divided, tmp_path, scheme):
    quantize_checkpoint(divided, tmp_path / "own", scheme)
    beside_one(tmp_path / "own", scheme)


@two_gpus
@pytest.mark.parametrize("apart", [False, True], ids=["parts of all experts", "half of the experts"])
def test_experts_on_two_gpus_have_the_perplexity_of_one(mixture, tmp_path, apart):
    quantize_checkpoint(mixture, tmp_path / "own", "w4a16_g128")
    beside_one(tmp_path / "own", "w4a16_g128", enable_expert_parallel=apart)


@two_gpus
def test_a_part_without_a_kernel_is_refused_by_name(divided, tmp_path):
    """Each half of the 2,944 channels has groups of 64. Products with 8-bit inputs have kernels for groups of 128 only."""
    quantize_checkpoint(divided, tmp_path / "own", "w4a8_g128")
    with pytest.raises(AssertionError, match="down_proj: no kernel for w4a8_g64"):
        answers(tmp_path / "own", [[1, 2]], tensor_parallel_size=2)


def beside_one(own, scheme, **options):
    """Returns log-probabilities of prompts on two GPUs and on one, from engines that run at the same time."""
    prompts = random_prompts()
    running = [started(own, prompts, 1, tensor_parallel_size=ranks, **(options if ranks > 1 else {})) for ranks in (2, 1)]
    try:
        two, one = ([known for answer in read(process) for known in answer["logprobs"]] for process in running)
    finally:
        for process in running:
            end(process)
    off = torch.tensor(two).double() - torch.tensor(one)
    print(f"{scheme}: {len(two)} tokens, nats per token differ by {off.mean():.1e}, each by {off.square().mean().sqrt():.1e}")
    # With 8-bit inputs, each part of a row has its own scale, so that codes are rounded differently.
    assert abs(off.mean()) < (5e-3 if "a16" in scheme else 3e-2)


def random_prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (2, 17, 64, 129, 300)]


def compare(own, scheme):
    prompts = random_prompts()
    made = answers(own, prompts)
    model, other = (load_causal(own, device="cuda", dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    off = count = 0.0
    for prompt, answer in zip(prompts, made, strict=True):
        ids = torch.tensor([prompt + answer["tokens"]], device="cuda")
        with torch.inference_mode():
            logits, rounded = (each(ids).logits[0].double() for each in (model, other))
        known = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[: len(prompt) - 1, 0]
        off += float((torch.tensor(answer["logprobs"], device="cuda") - known).sum())
        count += len(known)
        step = logits[len(prompt) - 1 : -1]
        behind = step.max(-1).values - step.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # Rounding to 16 bits moves logits, and moves them more if it flips codes of 8-bit activations. So another token may
        # have the largest logit, by about that much. The logit of a random token is about 6 smaller.
        moved = (logits - rounded).abs()
        said = f"{len(prompt)} tokens: {behind.tolist()}, rounding moves logits by {moved.mean():.3f}, up to {moved.max():.3f}"
        assert behind.max() < 2 * moved.max() < 5 and behind.mean() < moved.mean(), said
    print(f"{scheme}: nats per token differ by {off / count:.1e} over {count:.0f} tokens")
    assert abs(off / count) < 5e-3
