from __future__ import annotations

import json

import pytest
import torch

from benchmarks.request import FORMATS, QUICK_FORMATS, GemmRequest, columns_of, make_request
from lowbit.formats import parse_scheme
from lowbit.tune.trials import parse_rows


def test_defaults_and_texts():
    assert make_request() == GemmRequest() and GemmRequest().schemes == FORMATS
    quick = make_request(quick=True, rows="64")
    assert quick.schemes == QUICK_FORMATS and quick.rows == (64,) and not quick.sweep
    request = make_request("W4A16, w8a16_pc,w8a16", " 512x1024,512X1024 ", "16, 1,16", "bfloat16")
    assert request == GemmRequest(("w4a16_g128", "w8a16"), ((512, 1024),), (1, 16), "bfloat16")
    assert request.torch_dtype == torch.bfloat16
    assert GemmRequest.from_json(json.loads(json.dumps(request.as_json()))) == request


@pytest.mark.parametrize("name", FORMATS)
def test_the_default_formats_are_canonical_names(name):
    assert parse_scheme(name).name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(formats="int4"), "unknown scheme 'int4'; did you mean 'w4a16_g128'\\? the grammar is"),
        (dict(formats="fp8_block"), "fp8_block: bench gemm measures 16-bit, int8 and e4m3 activations"),
        (dict(formats="w8a16_t"), "one scale per channel or per group"),
        (dict(formats=" , "), "--formats ' , ' names nothing"),
        (dict(shapes="8192"), "--shapes '8192': a shape is NxK"),
        (dict(shapes="0x64"), "two positive numbers"),
        (dict(shapes="64x64x64"), "for example 8192x28672"),
        (dict(rows="1,many"), "numbers of tokens '1,many'"),
        (dict(rows="0"), "positive and comma-separated"),
        (dict(dtype="float32"), "--dtype 'float32': the activations are float16 or bfloat16"),
    ],
)
def test_mistakes_say_what_was_given_and_what_is_supported(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_request(**arguments)


def test_columns():
    assert columns_of(parse_scheme("w4a16_g128_z")) == {
        "scheme": "w4a16_g128_z", "format": "uint4", "granularity": "g128_z",
    }  # fmt: skip
    assert columns_of(parse_scheme("w6e3m2a16")) == {
        "scheme": "w6e3m2a16", "format": "fp6_e3m2", "granularity": "pc",
    }  # fmt: skip
    assert parse_rows("3,2") == (3, 2)
