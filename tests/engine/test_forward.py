"""The model's own forward, one text at a time."""

from __future__ import annotations

import pytest
import torch

from lowbit.engine.forward import ForwardProgram


class CacheModel:
    """A model as Transformers 5.24 has it: an argument `cache`, and a warning for the older name."""

    config, device, dtype = None, torch.device("cpu"), torch.float32

    def eval(self):
        return self

    def forward(self, input_ids, cache=None, use_cache=False, **older):
        assert not older, "`past_key_values` is deprecated"
        self.seen = cache
        return self

    __call__ = forward

    @property
    def logits(self):
        return torch.zeros(1, 2, 160)


class PastModel(CacheModel):
    """A model of Transformers 5.17 to 5.23."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        self.seen = past_key_values
        return self

    __call__ = forward


@pytest.mark.parametrize("kind", [CacheModel, PastModel])
def test_the_cache_is_passed_by_the_name_that_the_model_has_for_it(kind):
    model, cache = kind(), object()
    program = ForwardProgram(model, ())
    program._caches[0] = cache
    program._forward([1, 2], 0)
    assert model.seen is cache
