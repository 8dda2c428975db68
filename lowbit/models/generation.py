"""Sampling settings that a model's generation_config.json states, checked when the model is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lowbit.ops.sample import LEAST_TEMPERATURE

LEAST_TOP_P = 1e-6
"""Replaces a top_p of 0, which Transformers accepts. Only the most likely token, and tokens of equal probability, are kept."""


def sampling_settings(stated: Mapping[str, object]) -> dict[str, float | int]:
    """Returns default sampling settings, by the names of `Sampling`, from the fields of a generation config.

    Values that other libraries accept are mapped: a temperature below 0.001 to 0 (greedy), top_p 0 to one token, top_k -1 to 0
    (off). Raises ValueError with the field, its value and the allowed values for impossible settings.
    """
    ranges = {
        "temperature": ("from 0 to 1000", lambda x: 0 <= x <= 1000),
        "top_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
        "top_k": ("a whole number from -1 to 2^31 - 1", lambda x: -1 <= x < 1 << 31 and x == int(x)),
        "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
        "repetition_penalty": ("from 0.001 to 1000", lambda x: LEAST_TEMPERATURE <= x <= 1000),
    }
    settings: dict[str, float | int] = {}
    for name, (allowed, fits) in ranges.items():
        value = stated.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not fits(value):
            raise ValueError(f"{name} is {allowed}, or null for the default, got {value!r}; correct or remove this field")
        settings[name] = value
    if settings.get("temperature", 1) < LEAST_TEMPERATURE:
        settings["temperature"] = 0.0
    if settings.get("top_p") == 0:
        settings["top_p"] = LEAST_TOP_P
    if "top_k" in settings:
        settings["top_k"] = max(0, int(settings["top_k"]))
    return settings
