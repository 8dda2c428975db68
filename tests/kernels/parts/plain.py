"""Runs device functions of kernels/parts as plain Python on integers and arrays. No GPU and no compiler is needed."""

from __future__ import annotations

import re
import types

import numpy as np


def plain(function, **names):
    """A device function as plain Python, with the globals in `names` (`gl`, other device functions) replaced."""
    python = function.fn
    return types.FunctionType(python.__code__, {**python.__globals__, **names}, python.__name__, python.__defaults__)


class Integer(int):
    """A kernel's scalar."""

    def __rsub__(self, other):
        return Integer(other - int(self))

    def to(self, kind):
        return self


class Array(np.ndarray):
    """A kernel's tensor."""

    def broadcast_to(self, shape):
        return np.broadcast_to(self, shape).view(Array)


class Pointer:
    """A pointer: an array and an index into it."""

    def __init__(self, memory, index=0):
        self.memory, self.index = memory, index

    def __add__(self, index):
        return Pointer(self.memory, self.index + index)

    def __getitem__(self, axes):
        return Pointer(self.memory, self.index[axes])

    def to(self, kind):
        return self


def atomic_add(pointer, value, sem):
    before = pointer.memory[pointer.index]
    pointer.memory[pointer.index] += value
    return before


GL = types.SimpleNamespace(
    minimum=min,
    where=lambda condition, a, b: a if condition else b,
    arange=lambda first, end, layout: np.arange(first, end),
    SliceLayout=lambda dim, layout: None,
    static_range=range,
    int32=None,
    int64=None,
    store=lambda pointer, value: pointer.memory.__setitem__(pointer.index, value),
    load=lambda pointer: pointer.memory[pointer.index],
    atomic_add=atomic_add,
    reshape=lambda x, shape: np.reshape(x, shape).view(Array),
    permute=lambda x, order: np.transpose(x, order).view(Array),
    join=lambda a, b: np.stack([a, b], axis=-1).view(Array),
    split=lambda x: (x[..., 0], x[..., 1]),
    expand_dims=lambda x, axis: np.expand_dims(x, axis).view(Array),
    convert_layout=lambda x, layout, assert_trivial: x,
    constexpr=None,
)
"""Gluon's operations, implemented on NumPy arrays."""


def operands(text: str) -> set[int]:
    """The operand numbers n that occur in the PTX as $n."""
    return {int(number) for number in re.findall(r"\$(\d+)", text)}


def check_operands(text: str, constraints: str) -> None:
    """Asserts that the PTX uses exactly the operands that its constraints declare, and that braces match."""
    assert operands(text) == set(range(len(constraints.split(","))))
    assert text.count("{") == text.count("}")
