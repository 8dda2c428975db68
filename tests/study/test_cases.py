"""The list of cases is complete, has no duplicates, and gives each case a distinct name in result files."""

from __future__ import annotations

import pytest
from torch import nn

from lowbit.formats import PerChannel, PerGroup, parse_scheme
from lowbit.quantize import Awq, Gptq, Rtn
from study.cases import FORMATS, Case, cases, group_size, method_name, needs_text

TEXTS = ("code", "opticks", "topics")


def test_the_grid_is_whole():
    found = cases(64, TEXTS)
    assert len({case.key for case in found}) == len(found)
    grid = {(c.scheme, type(c.method)) for c in found if c.tasks and not isinstance(c.method, Awq)}
    schemes = {scheme for scheme, _ in grid}
    assert len(grid) == 2 * len(schemes) == 4 * len(FORMATS)
    for scheme in map(parse_scheme, schemes):
        assert scheme.weight.name in FORMATS and scheme.activation is None
        assert scheme.granularity in (PerChannel(), PerGroup(64))


def test_only_calibrated_cases_name_a_text_that_exists():
    for case in cases(32, TEXTS):
        assert (case.text in TEXTS) == needs_text(case) and (case.text is None) != needs_text(case)
    calibrated = {c.text for c in cases(32, TEXTS) if c.scheme == "w4a16_g32" and c.method == Gptq()}
    assert calibrated == set(TEXTS)


def test_names():
    assert method_name(Gptq()) == "gptq" and method_name(Rtn("mse")) == "rtn search=mse"
    assert method_name(Gptq(damping=0.01, act_order=True)) == "gptq act_order=True damping=0.01"
    assert Case("w8a16", Rtn()).key == "w8a16 rtn" and Case("w8a16", Rtn(), rotation=0).key == "w8a16 rtn rotate=True"
    assert Case("w8a8", Rtn(), rotate_inputs=True).method_name == "rtn rotate_inputs=*"
    assert Case("w8a16", Gptq(damping=0.01), "opticks", 2).key == "w8a16 gptq damping=0.01 opticks seed 2"


def test_group_size_divides_every_layer():
    assert group_size(nn.Sequential(nn.Linear(256, 8), nn.Linear(384, 8))) == 128
    assert group_size(nn.Sequential(nn.Linear(256, 8), nn.Linear(576, 8))) == 64
    with pytest.raises(ValueError, match=r"\[24, 256\] inputs"):
        group_size(nn.Sequential(nn.Linear(256, 8), nn.Linear(24, 8)))
