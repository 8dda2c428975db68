"""A stand-in for the module auto_round: it rounds to nearest, and accepts what auto-round 0.16.1 accepts."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import torch

from lowbit.formats import parse_scheme
from lowbit.quantize import rtn

PARAMETERS = {
    "model": inspect.Parameter.empty, "tokenizer": None, "platform": "hf", "scheme": "W4A16", "schemes": None, "bits": None,
    "layer_config": None, "dataset": None, "iters": None, "seqlen": 2048, "nsamples": 128, "batch_size": 8,
    "gradient_accumulate_steps": None, "low_gpu_mem_usage": False, "device_map": 0, "enable_torch_compile": None, "seed": 42,
    "low_cpu_mem_usage": True, "alg_configs": None, "algorithm": None,
}  # fmt: skip
"""Parameters of `AutoRound` in auto-round 0.16.1 (auto_round/autoround.py, `AutoRound.__new__`) and their defaults."""
OPTIONS = ("group_size", "sym", "data_type", "act_bits", "enable_alg_ext")
"""Those of its keyword options that are set here: fields of its schemes and of its SignRoundConfig. Others would be ignored."""


class AutoRound:
    """Takes the arguments of auto-round's class; `quantize` rounds every linear layer but the LM head to nearest, in place."""

    calls: list[dict] = []  # noqa: RUF012  (of all objects)

    def __init__(self, *args, **kwargs):
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in PARAMETERS.items()
        ]
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in OPTIONS]
        self.given = inspect.Signature(parameters).bind(*args, **kwargs).arguments
        self.calls.append(self.given)

    def quantize(self):
        model, bits, group = (self.given[name] for name in ("model", "bits", "group_size"))
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                q = rtn(module.weight.detach().float(), parse_scheme(f"w{bits}a16_g{group}"))
                module.weight.data = q.dequantize().to(module.weight.dtype)
        return model, {}


def install(monkeypatch, cls=AutoRound):
    """Puts the stand-in in place of the module."""
    module = ModuleType("auto_round")
    module.AutoRound, module.__version__ = cls, "0.16.1"
    monkeypatch.setitem(sys.modules, "auto_round", module)
    cls.calls = []
    return cls
