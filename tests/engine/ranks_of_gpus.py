"""Compares a model on two GPUs with the same model on one, and prints the results as JSON.

test_ranks_gpu.py runs this in a separate process for each case, since torch's peer memory serves only the first group of ranks
of a process.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.engine import Engine, Request, RequestFailed, Sampling
from lowbit.engine.rank_processes import load_ranks
from lowbit.models.load import load_causal
from lowbit.ops.peers import Peers

STARTED = time.monotonic()
VOCAB = 4000
LENGTHS = (1, 2, 77, 128, 129, 600)
GPU = torch.device("cuda")
OPTIONS = {"max_concurrent": 8, "cache_bytes": 1 << 28, "prefix_caching": False, "step_ms": None}
"""Which tokens are computed together depends neither on cached pages nor on time, so that two runs of the requests have the
same bits."""


def save(folder):
    """Saves a model whose next token depends on all tokens before. A cut over two ranks divides one of its groups of 128
    columns."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2944, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 1 else 2 * parameter.shape[1] ** -0.5)
    model.half().save_pretrained(folder)


def requests():
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    sampling = Sampling(temperature=0.7, top_k=50, seed=5, repetition_penalty=1.2)
    return [*(Request(ids, 24, top_logprobs=5) for ids in prompts), Request(prompts[2], 24, sampling=sampling)]


def compiled(engine):
    """The engine, after its kernels were compiled in several processes."""
    for _ in engine.compile():
        pass
    print(f"{time.monotonic() - STARTED:.0f} s: kernels compiled", file=sys.stderr, flush=True)
    return engine


def generated(engine):
    """Tokens and log-probabilities of all requests at once."""
    sequences = engine.generate(requests())
    return [[(sampled.token, sampled.logprob) for sampled in sequence.sampled] for sequence in sequences]


@torch.inference_mode()
def check_peers(engine):
    """Returns the largest error of sums over peer memory, in roundings of the sum, for several numbers of rows."""
    ranks = engine.program.ranks
    peers = ranks.peers
    assert isinstance(peers, Peers), peers
    worst = 0.0
    for m in (1, 2, 5, 16, 64):
        parts = [
            torch.randn(m, peers.width, generator=torch.Generator().manual_seed(97 * m + r)).to(engine.device, peers.dtype)
            for r in range(ranks.size)
        ]
        h = torch.randn(m, peers.width, generator=torch.Generator().manual_seed(m)).to(engine.device, peers.dtype)
        gamma = torch.randn(peers.width, generator=torch.Generator().manual_seed(3)).to(engine.device)
        for _ in range(3):
            total = ranks.total(parts[ranks.rank].clone(), 0)
            mine = h.clone()
            x, squares = ranks.added(parts[ranks.rank].clone(), mine, gamma, 0.5, 1)
            exact = sum(part.double() for part in parts)
            eps = torch.finfo(peers.dtype).eps
            size = exact.abs() + sum(part.double().abs() for part in parts)
            worst = max(worst, float(((total.double() - exact).abs() / (eps * size)).max()))
            worst = max(worst, float(((mine.double() - exact - h).abs() / (eps * (size + h.abs()))).max()))
            torch.testing.assert_close(x.float(), mine.float() * gamma * 0.5, rtol=4 * eps, atol=1e-6)
            torch.testing.assert_close(squares[0], mine.float().square().sum(1), rtol=1e-5, atol=0)
    return worst


def main(folder, scheme, ends):
    save(folder)
    scheme = None if scheme == "none" else scheme
    head = None if scheme is None else "w8a16"
    found = {}
    alone = compiled(Engine(load_causal(folder, scheme=scheme, device=GPU, head=head), **OPTIONS))
    one = generated(alone)
    found["alone"] = alone.difference
    begun = time.monotonic()
    model, ranks = load_ranks(folder, 2, GPU, scheme=scheme, head=head)
    engine = compiled(Engine(model, ranks=ranks, **OPTIONS))
    found |= {"started_s": time.monotonic() - begun, "difference": engine.difference, "report": engine.report()}
    found["peers"] = ranks.everywhere(engine, check_peers)
    two = generated(engine)
    found["same_twice"] = two == generated(engine)
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(one, two, strict=True)]
    alike = [next((i for i, (a, b) in enumerate(pair) if a[0] != b[0]), len(pair)) for pair in pairs]
    found["alike"] = alike
    found["logprobs"] = max(abs(a[1] - b[1]) for pair, n in zip(pairs, alike, strict=True) for a, b in pair[:n])
    if ends == "kill":
        ranks.processes[0].kill()
        begun = time.monotonic()
        try:
            generated(engine)
        except RequestFailed as error:
            found["failed"] = str(error)
        found["failed_s"] = time.monotonic() - begun
    else:
        ranks.end()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    # other ranks import functions by the name of their module, which must not be `__main__`
    from tests.engine import ranks_of_gpus

    ranks_of_gpus.main(*sys.argv[1:])
