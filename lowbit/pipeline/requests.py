"""What a call of a pipeline means to the engine: one request for each prompt, drawn as Transformers' `generate` draws."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import GenerationConfig

from lowbit.engine import Drawn, Request, Sampling
from lowbit.models.generation import sampling_settings
from lowbit.pipeline.request import GenerateParams

_USED = {"temperature", "min_p", "repetition_penalty"}
"""Fields of a model's generation config that a call takes over where it says nothing itself, as `generate` does."""

_SAID = {
    "do_sample", "top_k", "top_p", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "eos_token_id",
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config", "use_cache",
    "cache_implementation", "cache_config", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits",
}  # fmt: skip
"""Fields that a call or the pipeline says itself, or that say nothing of the tokens."""

_NEXT_SEED = 0x9E3779B97F4A7C15
"""Between the seeds of a call's prompts: 2^64 over the golden ratio, so that calls with neighbouring seeds share none."""


def config_refusals(config: GenerationConfig) -> tuple[str, ...]:
    """Why an engine cannot draw as a model's generation config asks; empty if it can."""
    asked = {name for name, value in config.to_diff_dict().items() if value is not None}
    unknown = sorted(asked - _USED - _SAID)
    return tuple(f"its generation config sets {name}={getattr(config, name, None)!r}" for name in unknown)


def requests_of(
    encoded: Sequence[Sequence[int]],
    limits: Sequence[int],
    params: GenerateParams,
    config: GenerationConfig,
    ends: Sequence[int],
    watches: Sequence[Callable[[Drawn], bool] | None],
) -> list[Request]:
    """A request for each prompt. Each has a random sequence of its own, the first that of the seed."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    ended_by = frozenset() if params.ignore_eos else frozenset(ends)
    return [
        Request(ids, limit, _sampling(params, config, seed + i * _NEXT_SEED), ended_by, watch)
        for i, (ids, limit, watch) in enumerate(zip(encoded, limits, watches, strict=True))
    ]


def _sampling(params: GenerateParams, config: GenerationConfig, seed: int) -> Sampling:
    own = sampling_settings(config.to_diff_dict())
    least = 0 if params.ignore_eos else params.min_new_tokens  # what is ignored is not held back either
    plain = Sampling(repetition_penalty=own.get("repetition_penalty", 1.0), min_new_tokens=least)
    if not params.do_sample:
        return plain
    temperature = params.temperature if params.temperature is not None else own.get("temperature", 1.0)
    return replace(
        plain, temperature=temperature, top_k=params.top_k or 0, top_p=params.top_p, min_p=own.get("min_p", 0.0),
        seed=seed % 2**64,
    )  # fmt: skip
