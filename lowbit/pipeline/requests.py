"""Makes the engine's requests of a pipeline call, one for each prompt. Sampling settings have the same meaning as in
Transformers' `generate`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import GenerationConfig

from lowbit.engine import Request, SampledToken, Sampling
from lowbit.models.generation import sampling_settings
from lowbit.pipeline.params import GenerateParams

_USED = {"temperature", "min_p", "repetition_penalty"}
"""Fields of a model's generation config whose values are the defaults of a call, as they are for `generate`."""

_SAID = {
    "do_sample", "top_k", "top_p", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "eos_token_id",
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config", "use_cache",
    "cache_implementation", "cache_config", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits",
}  # fmt: skip
"""Fields that calls and the pipeline set themselves, or that do not change the tokens."""

_NEXT_SEED = 0x9E3779B97F4A7C15
"""Difference between the seeds of a call's prompts: 2^64 divided by the golden ratio. It is large, so that two calls with
adjacent seeds have no seed in common."""


def config_refusals(config: GenerationConfig) -> tuple[str, ...]:
    """Returns the reasons why an engine cannot sample as a model's generation config states; empty if it can."""
    fields = {name for name, value in config.to_diff_dict().items() if value is not None}
    unknown = sorted(fields - _USED - _SAID)
    return tuple(f"its generation config sets {name}={getattr(config, name, None)!r}" for name in unknown)


def requests_of(
    encoded: Sequence[Sequence[int]],
    limits: Sequence[int],
    params: GenerateParams,
    config: GenerationConfig,
    stop_token_ids: Sequence[int],
    callbacks: Sequence[Callable[[SampledToken], bool] | None],
) -> list[Request]:
    """Returns a request for each prompt, each with another seed; the first has `params.seed`."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    stops = frozenset() if params.ignore_eos else frozenset(stop_token_ids)
    return [
        Request(ids, limit, _sampling(params, config, seed + i * _NEXT_SEED), stops, on_token, adapter=params.adapter)
        for i, (ids, limit, on_token) in enumerate(zip(encoded, limits, callbacks, strict=True))
    ]


def _sampling(params: GenerateParams, config: GenerationConfig, seed: int) -> Sampling:
    own = sampling_settings(config.to_diff_dict())
    least = 0 if params.ignore_eos else params.min_new_tokens  # ignored stop tokens need not be suppressed
    plain = Sampling(repetition_penalty=own.get("repetition_penalty", 1.0), min_new_tokens=least)
    if not params.do_sample:
        return plain
    temperature = params.temperature if params.temperature is not None else own.get("temperature", 1.0)
    return replace(
        plain, temperature=temperature, top_k=params.top_k or 0, top_p=params.top_p, min_p=own.get("min_p", 0.0),
        seed=seed % 2**64,
    )  # fmt: skip
