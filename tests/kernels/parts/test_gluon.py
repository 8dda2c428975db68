"""kernels/parts/gluon.py: its additions to Gluon work with every supported Triton."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lowbit
from tests.kernels.sass import compile_kernel

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import COSTS, WRITERS, Scalar, Tuple, aggregate, gl, gluon, half_type, source_digest


@aggregate
class Inner:
    """Two values."""

    first: Scalar
    second: Scalar


@aggregate
class Outer:
    """Values of several kinds."""

    inner: Inner
    several: Tuple
    tensor: gl.tensor


@gluon.jit
def total(values, C: gl.constexpr):
    """The sum of all values; None counts as 0."""
    made = values.tensor + values.inner.first + values.several[0] + values.several[1]
    if values.inner.second is not None:
        made += values.inner.second
    return made


@gluon.jit
def kernel(out, a, b, C: gl.constexpr):
    """Stores 32 sums."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.store(out + lanes, total(Outer(Inner(a, b), (a, C), tensor=lanes), C))


@pytest.mark.parametrize("second", ["i32", None])
def test_an_aggregate_carries_values_by_name(second):
    code = compile_kernel(kernel, {"out": "*i32", "a": "i32", "b": second}, 1000, ("out",), 1, 90)
    assert code.count("STG") == 1 and ("1000" in code.ptx) and code.stack_bytes == 0


def test_an_aggregate_refuses_what_it_has_no_name_for():
    with pytest.raises((TypeError, AttributeError), match="third"):
        Inner(1, 2, third=3)
    with pytest.raises(TypeError, match="for attribute 'inner'"):
        Outer(1, (), 2)


def test_the_kernels_take_two_types():
    assert (half_type(torch.float16), half_type(torch.bfloat16)) == ("fp16", "bf16")
    with pytest.raises(ValueError, match="float32"):
        half_type(torch.float32)


def test_what_writes_kernels_is_in_the_digest():
    """Files that determine packed layouts are in the kernels' digest. Otherwise Triton's disk cache would return old kernels
    for a new weight layout.
    """
    package = Path(lowbit.__file__).parent
    rooms = set()
    for path in [
        *package.glob("kernels/parts/*.py"),
        *package.glob("kernels/sm*/*.py"),
        *package.glob("kernels/elementwise/*.py"),
    ]:
        rooms |= set(re.findall(r"^from lowbit\.(\w+)", path.read_text(), re.MULTILINE))
    assert rooms <= set(WRITERS) and len(source_digest()) == 16


def test_costs_that_are_not_in_the_digest_write_nothing():
    """Kernels import only tiles, shapes and host functions from the files outside the digest. All numbers that kernels take
    from these are in their configurations.
    """
    package = Path(lowbit.__file__).parent
    assert all((package / path).exists() for path in COSTS)
    names = {path.rsplit("/", 1)[1].removesuffix(".py") for path in COSTS}
    importing = re.compile(r"^from lowbit\.kernels\.choose\.(\w+) import ([^(\n]+|\([^)]*\))", re.MULTILINE)
    taken = set()
    for room in ("parts", "sm*", "elementwise"):
        for path in package.glob(f"kernels/{room}/*.py"):
            for name, imported in importing.findall(path.read_text()):
                taken |= set(re.findall(r"\w+", imported)) if name in names else set()
    # These names are allowed: the result of shared_by is a field of RingGemm, share_refusals are reasons not to launch, and
    # expert_blocks is the grid. FEW_ROWS and MANY_ROWS are the heights of tiles that a plan accepts.
    tiles = {"MmaTile", "RingTile", "WgmmaTile", "ScaledTile"}
    hosts = {"expert_blocks", "shared_by", "share_refusals", "FEW_ROWS", "MANY_ROWS"}
    assert taken == {"ExpertShape", "GemmShape", "ScaledShape", *tiles, *hosts}
