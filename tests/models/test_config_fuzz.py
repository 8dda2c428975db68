"""Random changes of config.json give an error of one line, or the same model that Transformers makes of that config.json."""

from __future__ import annotations

import copy
import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowbit import convert_checkpoint, quantize_checkpoint
from lowbit.checkpoint.schema import GUARD_KEY
from lowbit.models.load import check_checkpoint, load_causal
from tests.tiny import save_tiny

CHANGES = 120
IDS = torch.arange(12)[None]
VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1.5, 0.0, 10**6, 10**12, 10**30, float("nan"), float("inf"), "", "64", "x",
    "None", "w8a16", "lowbit", "default", "float16", "model.norm", [], {}, [1, 2], ["x"], [None], {"a": 1}, [64, 64], [[]],
    {"shape": [64, 64]},
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A quantized checkpoint, and a plain one with its dequantized weights."""
    root = tmp_path_factory.mktemp("fuzz")
    save_tiny(root / "plain", tied=False)
    quantize_checkpoint(root / "plain", root / "quantized", "w4a16_g32")
    convert_checkpoint(root / "quantized", root / "dequantized", "dequantized")
    return root / "quantized", root / "dequantized"


def places(value, path=()):
    """The path of every field, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def mutate(config, random_):
    """Deletes, changes or renames one or two fields."""
    config = copy.deepcopy(config)
    changes = []
    for _ in range(random_.choice((1, 1, 2))):
        all_places = list(places(config))
        # half of the changes are in the model's part, half in lowbit's, which is longer because it lists every layer
        ours = [place for place in all_places if place[0] == "quantization_config"]
        rest = [place for place in all_places if place[0] != "quantization_config"]
        *path, last = random_.choice(random_.choice([group for group in (ours, rest) if group]))
        holder = config
        for step in path:
            holder = holder[step]
        kind, value = random_.choice(("delete", "change", "change", "change", "rename")), random_.choice(VALUES)
        if kind == "change" or isinstance(holder, list):
            holder[last] = copy.deepcopy(value)
        elif kind == "delete":
            del holder[last]
        else:
            holder[f"{last}x"] = holder.pop(last)
        changes.append((kind, *path, last, value))
    return config, changes


def logits(load):
    with torch.inference_mode():
        return load()(IDS).logits


def test_a_changed_config_is_refused_or_means_what_it_says(folders, tmp_path):
    quantized, dequantized = (tmp_path / folder.name for folder in folders)
    for source, target in zip(folders, (quantized, dequantized), strict=True):
        shutil.copytree(source, target)
    config = json.loads((quantized / "config.json").read_text())
    random_, outcomes = random.Random(0), {"refused": 0, "same": 0}
    for _ in range(CHANGES):
        changed, changes = mutate(config, random_)
        (quantized / "config.json").write_text(json.dumps(changed))
        try:
            wrong = check_checkpoint(quantized)
            found = logits(lambda: load_causal(quantized, device="cpu", dtype=torch.float32))
        except (ValueError, OSError) as error:
            assert "\n" not in str(error), (changes, error)
            outcomes["refused"] += 1
            continue
        assert wrong == (), changes  # a model that loads must have been found complete
        rest = {key: value for key, value in changed.items() if key not in ("quantization_config", GUARD_KEY)}
        (dequantized / "config.json").write_text(json.dumps(rest))
        model = AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32)
        expected = logits(lambda model=model: model)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3, equal_nan=True, msg=str(changes))
        outcomes["same"] += 1
    assert min(outcomes.values()) >= 10, outcomes
