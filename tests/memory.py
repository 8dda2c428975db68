"""Measures the peak memory of code in a separate process, and the peak of tensor memory in this process."""

from __future__ import annotations

import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.forks import forked

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

_FRAME = """
import sys, threading, time, torch
{setup}
peak, stop = 0, False
def rss():
    return int(next(line for line in open('/proc/self/status') if line.startswith('RssAnon')).split()[1]) * 1024
base = rss()
def watch():
    global peak
    while not stop:
        peak = max(peak, rss())
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
{measured}
stop = True; thread.join()
print(peak - base)
"""


_MODEL = "transformers.models.llama.modeling_llama"


def peak_bytes(setup: str, measured: str, *arguments: object) -> int:
    """The peak of anonymous memory in bytes that the code `measured` adds to what `setup` uses. Both see `arguments` as
    `sys.argv[1:]`.

    Freed memory returns to the system at once (fixed mmap threshold). Repeated runs differ by 0.2 MB; with glibc's growing
    threshold they differ by 24 MB.
    """
    code = _FRAME.format(setup=setup, measured=measured)
    return int(forked(code, *arguments, imported=("torch", _MODEL), MALLOC_MMAP_THRESHOLD_="65536").split()[-1])


class TensorBytes(TorchDispatchMode):
    """The peak bytes of tensors created inside the context, on any device. Unlike `torch.cuda.max_memory_allocated`, it does
    not count temporary allocations within operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage(), before)
        return made

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if key in before or key in self._known:
            return
        self._known.add(key)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.held -= nbytes
