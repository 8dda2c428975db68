"""Ranks: processes that compute one model together, each on its own device with its part of the weights (tensor parallelism).

They use three operations of torch.distributed, by NCCL on GPUs and by gloo on CPUs: sums of partial results, logits gathered
from the parts of a vocabulary, and the smallest of a number of each rank. CUDA graphs may capture the first two. Sums of a few
rows use peer memory instead of NCCL if the GPUs support it (peers.py).

NVLink multicast is never used, and is switched off for NCCL and for symmetric memory: on hosts that several users share, a
program that uses it can leave the GPUs unusable for all.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lowbit.ops.elementwise import add_norm_squares
from lowbit.ops.peers import Peers, peers_refusals

WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Environment variables that switch off NVLink multicast in NCCL, PyTorch and NVSHMEM."""

WITHOUT_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Environment variables with which PyTorch does not end a process whose operations are aborted. The code that aborts them
reports the reason itself."""

WAIT = datetime.timedelta(hours=1)
"""How long an operation waits for another process that is alive but late, such as one that compiles kernels."""


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


def prepare_libraries() -> None:
    """Sets the variables above for the libraries in this process and for processes that it starts."""
    for name, value in (WITHOUT_MULTICAST | WITHOUT_WATCHDOG).items():
        os.putenv(name, value)


class Ranks:
    """The process `rank` of `size`, which computes on `device`. The constructor joins the others through the TCP store at
    `port` of this host, and returns once all have joined. A process can have only one such object at a time.
    """

    def __init__(self, rank: int, size: int, device: torch.device, port: int, *, store: TCPStore | None = None) -> None:
        self.rank, self.size, self.device = rank, size, device
        prepare_libraries()
        on_gpu = device.type == "cuda"
        store = store or TCPStore("127.0.0.1", port, size, is_master=False, timeout=WAIT)
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=WAIT,
            device_id=device if on_gpu else None,
        )  # fmt: skip
        self.peers: Peers | tuple[str, ...] = ("no model has been prepared for it",)
        """Computes sums of few rows in peer memory, or the reasons why NCCL or gloo computes them."""
        self.least(0)  # the first operation connects the ranks, which is not possible in the capture of a graph

    def use_peers(self, width: int, dtype: torch.dtype) -> None:
        """Makes sums of few rows of `width` elements use peer memory, if all GPUs support it. All ranks must call it."""
        self.peers = peers_refusals(width, dtype, self.device)
        if not self.peers:
            try:
                self.peers = Peers(self.rank, self.size, width, dtype, self.device, self.least)
            except RuntimeError as error:
                self.peers = (str(error),)

    def total(self, x: Tensor, phase: int) -> Tensor:
        """Returns the sum of all ranks' x, which have one shape and dtype; x may be overwritten. All ranks get the same bits.
        Calls must alternate between the phases 0 and 1."""
        if isinstance(self.peers, Peers) and self.peers.takes(x):
            return self.peers.total(x, phase)
        if self._dry:
            return x
        if x.device.type == "cpu" and x.dtype != torch.float32:
            wide = x.float()
            dist.all_reduce(wide)
            return wide.to(x.dtype)
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def added(self, y: Tensor, h: Tensor, gamma: Tensor, factor: float, phase: int) -> tuple[Tensor, Tensor]:
        """Adds the sum of all ranks' y [M, H] to h in place; returns the same as `ops.elementwise.add_norm_squares`. `phase` is
        that of `total`."""
        if isinstance(self.peers, Peers) and self.peers.takes(y):
            return self.peers.added(y, h, gamma, factor, phase)
        return add_norm_squares(h, self.total(y, phase), gamma, factor=factor)

    def gathered(self, x: Tensor, columns: int) -> Tensor:
        """Returns the concatenation of all ranks' x [M, n] along columns, in the order of ranks, cut to `columns` columns."""
        m, n = x.shape
        parts = x.new_empty((self.size, m, n))
        if not self._dry:
            _all_gather(parts.view(self.size * m, n), x.contiguous())
        return parts.transpose(0, 1).reshape(m, self.size * n)[:, :columns].contiguous()

    def least(self, number: int) -> int:
        """Returns the smallest of all ranks' numbers."""
        held = torch.tensor([number], device=self.device)
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held)

    @property
    def _dry(self) -> bool:
        """True while kernels are recorded instead of launched, which each rank does alone."""
        if self.device.type != "cuda":
            return False
        from lowbit.kernels.parts.launch import is_recording

        return is_recording()

    def abort(self) -> None:
        """Ends operations that wait for a rank that has ended; their results are undefined."""
        if isinstance(self.peers, Peers):
            self.peers.stop()
        if self.device.type == "cuda" and dist.is_initialized():
            backend = dist.group.WORLD._get_backend(self.device)  # type: ignore[union-attr]
            backend.abort()  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Leaves the group. All ranks must do this together."""
        if dist.is_initialized():
            dist.destroy_process_group()
