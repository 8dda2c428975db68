"""The engine: decode steps over packed weights, with a paged KV cache and continuous batching.

A request:
    engine.py            submit, cancel, stream, step            request.py          a prompt and how to continue it
    sequence.py          its state: tokens, pages, reason        failure.py          which errors end what
    detokenizer.py       incremental text, stop strings          grammar.py          what a sequence may say
    deprecated.py        names until 2026-11
A step:
    scheduler.py         what the next step computes             block_pool.py       pages of the cache, prefix caching
    model_runner.py      launches a step, copies its tokens      slots.py            device tensors of running sequences
    decode_runner.py     decode steps as CUDA graphs             prefill_runner.py   prefill chunks as CUDA graphs
    verify_runner.py     decode steps with guessed tokens        speculation.py      which tokens are guessed
    draft.py             a small model that guesses              mixed_runner.py     decode steps with prompts
    step_budget.py       prompt tokens of such steps
    ragged.py            prefill chunks as tensors of one shape  graphs.py           memory shared by all graphs
    warm_up.py           kernels that will be launched           cache.py            memory of keys and values
    kernels.py           kernels files
A model:
    family.py            known families, as declarations         decoder.py          what a decoder computes, as data
    recognise.py         reads a model as a decoder              family_refusals.py  why a model has no decode program
    family_model.py      modules by the paths of a family        check.py            compares a program with its model
    model_program.py     the interface of programs               forward.py          models without a decode program
    program.py           a decoder as a list of operators        chain.py            up to 64 tokens in fewer launches
    product.py           products that share one weight tensor   prompt_attention.py attention of prefill chunks
Several GPUs:
    shard.py             what each rank holds of a model         shard_loading.py    loads it
    rank_processes.py    starts, connects and ends the ranks     rank_process.py     a rank other than 0
    lockstep.py          how ranks compute the same steps
"""

from lowbit.engine import deprecated
from lowbit.engine.detokenizer import Detokenizer
from lowbit.engine.engine import Engine
from lowbit.engine.failure import EngineFailed, RankFailed, RequestFailed, StepFailed
from lowbit.engine.grammar import CompiledGrammar, Grammar, GrammarCompiler, GrammarsUnavailable
from lowbit.engine.request import Request, SampledToken
from lowbit.engine.sequence import FinishReason, Sequence
from lowbit.ops.sample import Sampling

__all__ = [
    "CompiledGrammar", "Detokenizer", "Engine", "EngineFailed", "FinishReason", "Grammar", "GrammarCompiler",
    "GrammarsUnavailable", "RankFailed", "Request", "RequestFailed", "SampledToken", "Sampling", "Sequence", "StepFailed",
]  # fmt: skip

deprecated.accept_names()
__getattr__ = deprecated.class_of
