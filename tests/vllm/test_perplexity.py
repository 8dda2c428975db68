"""vLLM's engine on a CPU and `lowbit eval` measure the same perplexity of the quantized demo model."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from lowbit import demo
from lowbit.eval.perplexity import perplexity
from lowbit.eval.text import sample_text
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from tests.forks import forked
from tests.vllm.folders import SETTINGS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make test-vllm)")

ENGINE = """
import json, sys
if __name__ == "__main__":
    folder, texts, dtype = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    from vllm import LLM, SamplingParams
    engine = LLM(folder, max_model_len=max(map(len, texts)) + 1, max_num_seqs=1, dtype=dtype, enforce_eager=True)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    answers = engine.generate([{"prompt_token_ids": text} for text in texts], asked, use_tqdm=False)
    known = [place[token].logprob for answer, text in zip(answers, texts, strict=True)
             for place, token in zip(answer.prompt_logprobs[1:], text[1:], strict=True)]
    print("LOGPROBS" + json.dumps(known), flush=True)
"""


def served(folder, texts, dtype):
    """vLLM's perplexity over token-id texts; the first token of each text is not predicted."""
    settings = SETTINGS | {"VLLM_CACHE_ROOT": str(folder.parent / "cache")}
    out = forked(ENGINE, folder, json.dumps(texts), dtype, imported=("vllm",), **settings)
    known = json.loads(next(line for line in out.splitlines() if line.startswith("LOGPROBS"))[8:])
    return math.exp(-math.fsum(known) / len(known))


@pytest.mark.model
def test_perplexity_of_the_demos_model(tmp_path):
    """Compares the perplexities of two windows of the text of `lowbit eval`."""
    try:
        source = demo.download_model(print)
    except demo.DemoError as error:
        pytest.skip(str(error))
    folder = tmp_path / "model"
    quantize_checkpoint(source, folder, "w4a16_g64")
    ids = AutoTokenizer.from_pretrained(folder)(sample_text(), return_tensors="pt").input_ids[:, :512]
    ours = perplexity(load_causal(folder, device="cpu", dtype=torch.float32), ids, window=256)
    assert ours.tokens == 2 * 255
    assert served(folder, ids.view(2, 256).tolist(), "float32") == pytest.approx(ours.perplexity, rel=1e-5)
