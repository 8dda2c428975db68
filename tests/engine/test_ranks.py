"""A model is computed by two processes on a CPU, with sums by gloo, and compared with one process: logits, tokens, and
failures."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers

import lowbit
from lowbit.checkpoint.numerics import read as read_numerics
from lowbit.engine import (
    Engine,
    EngineFailed,
    Grammar,
    GrammarCompiler,
    RankFailed,
    Request,
    RequestFailed,
    Sampling,
    rank_process,
)
from lowbit.engine.rank_processes import load_ranks, start_ranks
from lowbit.engine.shard_loading import load_part
from lowbit.models import numerics
from lowbit.models.load import load_causal
from lowbit.ops.elementwise import add_norm_squares
from lowbit.ops.peers import Peers, peers_refusals
from tests.engine.test_engine import prompt, tokens
from tests.forks import ROOT
from tests.tiny import eager_llama, json_tokenizer, save_tiny

CPU = torch.device("cpu")
OPTIONS = {"max_concurrent": 4, "chunk_tokens": 128, "cache_bytes": 1 << 22, "max_length": 256}
"""There are fewer slots and pages than the requests need, so that some wait and some are preempted."""


def save(folder, intermediate_size=176, num_key_value_heads=2, **options):
    """Saves a Llama whose next token depends on all tokens before. It has biases, an LM head of 161 rows, and groups that the
    cut over two ranks divides."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=161, hidden_size=64, intermediate_size=intermediate_size, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=num_key_value_heads, max_position_embeddings=512, attention_bias=True, **options,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 1 else 2 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def requests(grammar=None):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=3, presence_penalty=0.5, logit_bias={7: 1.0})
    asked = [Request(prompt(length), 16, top_logprobs=3) for length in (1, 2, 77, 127, 130, 200)]
    asked += [Request(prompt(30, 1), 16, sampling=sampling), Request([*prompt(130), 9], 16)]
    return asked if grammar is None else [*asked, Request(prompt(9), 40, grammar=grammar)]


def grammar():
    compiler = GrammarCompiler(json_tokenizer(), 161, [1])
    return compiler.compile(Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}))


def logprobs(sequence):
    return torch.tensor([[value for _, value in sampled.top_logprobs] for sampled in sequence.sampled])


@pytest.mark.parametrize(
    ("options", "loading", "more"),
    [
        ({"tie_word_embeddings": True}, {}, {}),
        ({}, {"scheme": "w4a16_g32"}, {"kv": "int8", "speculate": 2}),
    ],
    ids=["16 bits, tied", "w4a16_g32, int8 keys and values, guesses"],
)  # fmt: skip
def test_two_processes_compute_what_one_does(tmp_path, options, loading, more):
    """The requests have prompts at page borders, shared prefixes, sampled tokens and a grammar. Some sequences wait or are
    preempted."""
    save(tmp_path, **options)
    one = Engine(load_causal(tmp_path, device="cpu", dtype=torch.float32, **loading), **OPTIONS, **more)
    model, ranks = load_ranks(tmp_path, 2, CPU, dtype=torch.float32, **loading)
    try:
        engine = Engine(model, ranks=ranks, **OPTIONS, **more)
        assert engine.difference < 1e-5 and "2 ranks, each with its part of the weights; sums by gloo" in engine.report()
        constrained = grammar() if not more else None
        found, expected = engine.generate(requests(constrained)), one.generate(requests(constrained))
        for mine, wanted in zip(found, expected, strict=True):
            assert tokens(mine) == tokens(wanted) and mine.finish_reason == wanted.finish_reason
            if mine.request.top_logprobs:
                torch.testing.assert_close(logprobs(mine), logprobs(wanted), rtol=1e-4, atol=1e-4)
        assert not isinstance(engine.program.ranks.peers, Peers)
        with pytest.raises(ValueError, match="of which each rank has a part"):
            engine.embed([5, 6])
    finally:
        ranks.end()
    assert all(process.poll() == 0 for process in ranks.processes)
    with pytest.raises(RankFailed, match="were ended"):
        ranks.check()


def test_a_pipeline(tmp_path):
    save_tiny(tmp_path, dtype=torch.float32)
    asked = {"max_new_tokens": 6, "do_sample": False}
    prompts = ["Once upon a time", "2 + 2 ="]
    alone = lowbit.pipeline(str(tmp_path), device="cpu", engine=True)(prompts, **asked)
    pipe = lowbit.pipeline(str(tmp_path), device="cpu", tensor_parallel=2)
    try:
        assert pipe(prompts, **asked) == alone
        assert "".join(pipe.stream(prompts[0], **asked)) == alone[0].generated_text
    finally:
        pipe.destroy()


def test_parts_are_compared_with_what_the_checkpoint_states(tmp_path):
    """Ranks compare their layers with the record in the checkpoint. Layers are cut by rows, by columns, or shared whole by
    ranks with the same KV head. An error names the layer that differs."""
    save(tmp_path / "plain", num_key_value_heads=1)
    lowbit.quantize_checkpoint(tmp_path / "plain", tmp_path / "q", "w4a16_g32")
    _, ranks = load_ranks(tmp_path / "q", 2, CPU, dtype=torch.float32)
    ranks.end()
    kept = read_numerics(tmp_path / "q")
    for name in ("model.layers.1.self_attn.o_proj", "model.layers.0.mlp.up_proj"):
        sums = kept.layers[name]
        wrong = dataclasses.replace(sums, sums=sums.sums.roll(1, dims=1))
        numerics.write(tmp_path / "q", dataclasses.replace(kept, layers=kept.layers | {name: wrong}))
        with pytest.raises(numerics.NumericsError, match=f"1 of 14 layers do not compute on cpu.*{name}"):
            load_ranks(tmp_path / "q", 2, CPU, dtype=torch.float32)
    (values, largest), layers = kept.logits, kept.layers
    numerics.write(tmp_path / "q", dataclasses.replace(kept, layers=layers, logits=(values, largest.flip(1))))
    with pytest.raises((numerics.NumericsError, RankFailed), match="the model's logits differ"):
        load_ranks(tmp_path / "q", 2, CPU, dtype=torch.float32)


def test_what_goes_without_several_processes_is_refused(tmp_path):
    save_tiny(tmp_path)
    for options, words in (
        ({"engine": False}, "tensor_parallel=2 is the engine's, and goes without engine=False"),
        ({"draft": str(tmp_path)}, "goes without a draft model"),
        ({"lora": {"x": str(tmp_path)}}, "goes without LoRA adapters"),
        ({"tensor_parallel": 3}, "its 4 heads are no multiple of 3"),
        ({"tensor_parallel": 4, "batch_invariant": True}, "batch_invariant goes with up to 2 ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            lowbit.pipeline(str(tmp_path), device="cpu", **{"tensor_parallel": 2} | options)
    with pytest.raises(ValueError, match="tensor parallelism is for 2 or more ranks, got 1"):
        load_ranks(tmp_path, 1, CPU)


def test_a_rank_that_ends_fails_all_with_its_reason(tmp_path):
    """A rank ends while sequences run. They fail within 10 seconds with the reason, and later requests fail too."""
    eager_llama().save_pretrained(tmp_path)
    model, ranks = load_ranks(tmp_path, 2, CPU)
    noted = []
    ranks.on_failure = lambda: noted.append(ranks.failure)
    try:
        engine = Engine(model, ranks=ranks, max_concurrent=4, cache_bytes=1 << 24)
        begun = None

        def on_token(sampled):
            nonlocal begun
            if begun is None:
                begun = time.monotonic()
                ranks.processes[0].kill()
            return False

        with pytest.raises(RequestFailed, match="rank 1: ended with signal SIGKILL"):
            engine.generate([Request([5, 6, 7], 200, on_token=on_token)])
        assert time.monotonic() - begun < 10
        with pytest.raises(EngineFailed, match="rank 1: ended with signal SIGKILL"):
            engine.submit(Request([5], 1))
        assert noted == ["rank 1: ended with signal SIGKILL"]
    finally:
        ranks.end()


def fails_on_rank_1(rank, device, folder):
    """Fails on rank 1, which cannot load its part."""
    if rank:
        raise MemoryError("no memory for its part")
    return load_tiny(rank, device, folder)


def fails_on_rank(engine, rank):
    """Fails on one rank, as an operation might."""
    if engine.program.ranks.rank == rank:
        raise ValueError(f"rank {rank} has no such thing")


def test_an_error_of_a_rank_is_the_reason(tmp_path):
    """The error names the reason of the rank: one cannot load its part, another fails later."""
    save_tiny(tmp_path, dtype=torch.float32)
    begun = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1: MemoryError: no memory for its part"):
        start_ranks(functools.partial(fails_on_rank_1, folder=str(tmp_path)), 2, CPU)
    model, ranks = load_ranks(tmp_path, 2, CPU)
    try:
        engine = Engine(model, ranks=ranks, max_concurrent=2, cache_bytes=1 << 24)
        ranks.everywhere(engine, fails_on_rank, 1)
        with pytest.raises((RankFailed, RequestFailed), match="rank 1: ValueError: rank 1 has no such thing"):
            engine.generate([Request([5, 6], 200)])
    finally:
        ranks.end()
    assert time.monotonic() - begun < 60


def load_tiny(rank, device, folder):
    return load_part(
        rank, device, source=folder, ranks=2, scheme=None, dtype=None, head=None, batch_invariant=False, verify=False
    )


def ends_while_joining(rank, device, folder):
    """Loads the rank's part. Rank 1 ends while rank 0 connects to it."""
    if rank:
        rank_process.Ranks = lambda *arguments: time.sleep(0.5) or os._exit(3)
    return load_tiny(rank, device, folder)


def fails_in_its_engine(rank, device, folder):
    """Loads the rank's part. Rank 1 has no memory for slots."""
    if rank:
        rank_process.Engine = no_memory
    return load_tiny(rank, device, folder)


def no_memory(*arguments, **options):
    raise MemoryError("no memory for slots")


JOINING = """
import functools, sys, torch
from lowbit.engine import RankFailed
from lowbit.engine.rank_processes import start_ranks
from tests.engine.test_ranks import ends_while_joining
try:
    start_ranks(functools.partial(ends_while_joining, folder=sys.argv[1]), 2, torch.device("cpu"))
except RankFailed as error:
    print(error, flush=True)
"""


def test_a_rank_that_ends_while_all_join(tmp_path):
    """Rank 0 reports the ended rank, and then ends with status 1, since its connecting thread may wait for ever."""
    save_tiny(tmp_path, dtype=torch.float32)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JOINING, str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=90
    )
    assert (done.stdout.strip(), done.returncode) == ("rank 1: ended with status 3", 1), done.stderr[-2000:]


def test_a_rank_without_an_engine(tmp_path):
    save_tiny(tmp_path, dtype=torch.float32)
    model, ranks = start_ranks(functools.partial(fails_in_its_engine, folder=str(tmp_path)), 2, CPU)
    try:
        with pytest.raises(RankFailed, match="rank 1: MemoryError: no memory for slots"):
            Engine(model, ranks=ranks, max_concurrent=2, cache_bytes=1 << 24)
    finally:
        ranks.end()


LEADER = """
import sys, torch
from lowbit.engine.rank_processes import load_ranks
model, ranks = load_ranks(sys.argv[1], 2, torch.device("cpu"))
print(ranks.processes[0].pid, flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_the_process_that_started_them(tmp_path):
    """The other ranks end with the process that started them, even if it is killed."""
    save_tiny(tmp_path, dtype=torch.float32)
    leader = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LEADER, str(tmp_path)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert leader.stdout is not None
    pid = int(leader.stdout.readline())
    os.kill(pid, 0)
    leader.send_signal(signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + 10
    while _lives(pid):
        assert time.monotonic() < deadline, "rank 1 lives on"
        time.sleep(0.05)


def _lives(pid):
    """Returns True unless the process has ended. A zombie counts as ended: in a container it may never be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def added_everywhere(engine, seed):
    """Compares sums over ranks, with and without a residual, with the sum of all ranks' parts on one rank."""
    ranks = engine.program.ranks
    parts = [torch.randn(3, 64, generator=torch.Generator().manual_seed(seed + rank)) for rank in range(ranks.size)]
    h, gamma = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed - 1))[:, None].expand(2, 3, 64).unbind()
    mine, wanted = h.clone(), h.clone()
    x, squares = ranks.added(parts[ranks.rank].clone(), mine, gamma[0].contiguous(), 0.5, 0)
    expected = add_norm_squares(wanted, sum(parts), gamma[0].contiguous(), factor=0.5)
    torch.testing.assert_close((mine, x, squares), (wanted, *expected))
    total = ranks.total(parts[ranks.rank].to(torch.bfloat16), 1)
    torch.testing.assert_close(total, sum(part.bfloat16().float() for part in parts).bfloat16())
    gathered = ranks.gathered(parts[ranks.rank], 100)
    torch.testing.assert_close(gathered, torch.cat(parts, 1)[:, :100])
    return ranks.least(5 - ranks.rank)


def test_common_operations(tmp_path):
    save_tiny(tmp_path, dtype=torch.float32)
    model, ranks = load_ranks(tmp_path, 2, CPU)
    try:
        engine = Engine(model, ranks=ranks, max_concurrent=2, cache_bytes=1 << 24)
        assert ranks.everywhere(engine, added_everywhere, 11) == 4
        for options in ({"forward": True}, {"persistent_step": True}, {"speculate": 2, "draft": model}):
            with pytest.raises(ValueError, match="tensor parallelism goes without"):
                Engine(model, ranks=ranks, **options)
        with pytest.raises(ValueError, match="these ranks have an engine; for another one, load the model again"):
            Engine(model, ranks=ranks)
        engine.generate([Request([5, 6], 3)])
        with pytest.raises(RankFailed, match="rank 0: ValueError: rank 0 has no such thing"):
            ranks.everywhere(engine, fails_on_rank, 0)
        assert ranks.processes[0].wait(10) == -signal.SIGKILL, "it would wait for rank 0"
        with pytest.raises(RequestFailed, match="rank 0: ValueError: rank 0 has no such thing"):
            engine.generate([Request([5, 6], 3)])
    finally:
        ranks.end()


def test_what_peer_memory_does_not_hold():
    assert peers_refusals(4096, torch.bfloat16, torch.device("cuda", 0)) == ()
    reasons = peers_refusals(100, torch.float32, CPU)
    assert [reason.split(",")[0] for reason in reasons] == [
        "it is memory of GPUs", "it holds rows of fp16 or bf16", "it holds rows of a multiple of 8 elements",
    ]  # fmt: skip
