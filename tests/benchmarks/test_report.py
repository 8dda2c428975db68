from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks import report


def test_lines_stand_beside_the_best_peer_of_the_same_scheme(document):
    first, failed, other = report.lines(document)
    assert (first.peer, first.peer_us, first.times_peer, first.times_cublas) == ("humming", 4.0, 2.0, 4.0)
    assert first.share == pytest.approx(document["rows"][2]["limit_us"] / 2.0)
    assert failed.us is failed.share is failed.times_cublas is None and failed.cublas_us == 9.0
    assert (other.n, other.k, other.peer, other.times_cublas) == (512, 1024, None, None)


def test_the_limit_is_the_larger_one():
    assert report.limit_of({"limit_us": 3.0, "compute_us": 5.0}) == 5.0


def test_markdown(document):
    text = report.markdown(document)
    assert "NVIDIA H200" in text and "4.00 TB/s" in text and "800 TFLOP/s" in text and "some-peer 1.2" in text
    assert "| w4a16_g128 | 1 | 2.0 | 0.3 | 14 % | 8.0 | 4.00x | humming 4.0 | 2.00x |" in text
    assert "| w4a16_g128 | 16 | - |" in text and "interrupted" not in text
    assert text.index("**N = 1024, K = 2048**") < text.index("**N = 512, K = 1024**")
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert "| 16 |" not in report.markdown(document, (1,))
    with pytest.raises(ValueError, match="no row of lowbit with M in 7"):
        report.markdown(document, (7,))
    assert "interrupted" in report.markdown({**document, "complete": False})


def test_terminal_table_and_failures(document):
    screen = io.StringIO()
    Console(width=200, file=screen).print(report.table(document))
    shown = screen.getvalue()
    assert "w4a16_g128" in shown and "humming" in shown and "2.00x" in shown
    assert report.failed(document) == ["lowbit w4a16_g128: 1 not measured: UnsupportedProblem: no kernel"]


def test_only_what_is_asked_for(document):
    text = report.markdown(document, (1,), None, [(512, 1024)])
    assert "N = 512, K = 1024" in text and "N = 1024" not in text
    with pytest.raises(ValueError, match="no row"):
        report.markdown(document, None, None, [(7, 7)])


def test_readme_block_is_replaced_in_place(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n<!-- {report.MARK} -->\nold\n<!-- /{report.MARK} -->\nend\n")
    for _ in range(2):  # idempotent
        report.rewrite_readme(readme, "new\n")
        assert readme.read_text() == f"# Title\n<!-- {report.MARK} -->\nnew\n<!-- /{report.MARK} -->\nend\n"
    readme.write_text(f"<!-- /{report.MARK} --><!-- {report.MARK} -->")
    with pytest.raises(ValueError, match="once each and in this order"):
        report.rewrite_readme(readme, "new")
