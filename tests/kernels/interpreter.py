"""Runs kernels in Triton's interpreter. It must be enabled before kernels are defined, hence a separate process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from tests.forks import forked


def interpreted(*checks: Callable[[], None]) -> None:
    """Calls functions of one test file in a process where all kernels are interpreted."""
    (module,) = {check.__module__ for check in checks}
    calls = "; ".join(f"tests.{check.__name__}()" for check in checks)
    # Importing this here saves time: torch would import it when it first compares two tensors, which takes two thirds of a
    # second.
    imported = ("torch", "triton.experimental.gluon", "lowbit.ops", "tests.kernels.sass", "torch.distributed.tensor")
    code = f"from tests.kernels.interpreter import hurry; hurry(); import {module} as tests; {calls}"
    forked(code, imported=imported, TRITON_INTERPRET="1")


def hurry() -> None:
    """Patches Triton's interpreter to be faster. It spends most of its time on repeated work: it looks up NumPy dtypes, patches
    Triton's language at each call of a device function, combines numbers one by one in reductions, and recomputes every integer
    sum and product in 64 bits for a check that only debugging uses.
    """
    import triton.language as tl
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def replaced(module):
        return [name for name, member in inspect.getmembers(module) if is_builtin(member)]

    def members(module):
        return [(name, getattr(module, name)) for name in replaced(module)]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": members})
    replace_in = interpreter._patch_lang

    @functools.cache
    def languages(function):
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def replace_once(function):
        """The outermost kernel patches Triton's language and restores it at its end; device functions it calls find it
        patched.
        """
        wanted = any(is_builtin(language.load) for language in languages(function))
        return replace_in(function) if wanted else interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once
    by_type, of_numbers = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda given: (by_type if given.scalar.is_ptr() else of_numbers)(given.scalar)
    interpreter.ReduceOps.generic_reduce = _reduce
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "the check is made: its numbers are needed"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _reduce(self, tensors):
    """Reduces by combining the two halves of each tensor along the axis, until one slice is left."""
    parts = [tensor.handle.data for tensor in tensors]
    while parts[0].shape[self.axis] > 1:
        sides = zip(*(np.split(part, 2, self.axis) for part in parts), strict=True)
        halves = [self.to_tensor(half, of.dtype) for side in sides for half, of in zip(side, tensors, strict=True)]
        made = self.combine_fn.fn(*halves)
        parts = [part.handle.data for part in (made if isinstance(made, tuple) else (made,))]
    if not self.keep_dims:
        parts = [part.squeeze(self.axis) for part in parts]
    return [self.to_tensor(part, of.dtype) for part, of in zip(parts, tensors, strict=True)]
