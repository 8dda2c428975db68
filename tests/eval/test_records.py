"""Errors about damaged data files say what is wrong and in which line."""

from __future__ import annotations

import pytest

from lowbit.eval.records import read_records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no records"),
        ("\n\n", "holds no records"),
        ('{"a": 1}\n{"a": \n', "line 2: one JSON object a line"),
        ("[1]\n", "line 1: .*a list"),
    ],
)
def test_damaged_files(content, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_records(path)


def test_damaged_gzip(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    for content in (b"not gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="damaged gzip"):
            read_records(path)


def test_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line"):
        read_records(path)
