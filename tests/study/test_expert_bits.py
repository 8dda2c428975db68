"""Formats by expert of a small mixture, at equal bits."""

from __future__ import annotations

import torch

from lowbit.formats import parse_scheme
from study.expert_bits import compare
from tests.models.mixtures import tiny_mixture


def test_three_choices(tmp_path):
    for name in ("qwen3_moe", "gpt_oss"):
        tiny_mixture(name).save_pretrained(tmp_path / name)
        tokens = torch.randint(3, 160, (8, 24), generator=torch.Generator().manual_seed(0))
        schemes = [parse_scheme(f"w{bits}a16_g16") for bits in (3, 4, 5)]
        results = compare(tmp_path / name, tokens[::2], tokens[1::2], schemes, "cpu")
        assert set(results["divergence"]) == {"one format", "by hits", "by error"}
        assert all(0 < value < 1 for value in results["divergence"].values())
        assert [sum(own["tokens"]) for own in results["layers"].values()] == [2 * 4 * 24] * 2
        same = compare(tmp_path / name, tokens[::2], tokens[1::2], schemes[1:2], "cpu")["divergence"]
        assert len(set(same.values())) == 1  # one format leaves no choice
