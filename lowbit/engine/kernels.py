"""Uses kernels files (kernels/kernel_file.py): which one, and one line where none can be used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowbit.hardware.machine import machine_of

if TYPE_CHECKING:
    from lowbit.kernels.kernel_file import KernelFile

logger = logging.getLogger(__name__)

PATTERN = "kernels-*.lowbit"
"""Names of kernels files that are found beside a checkpoint."""


def use_kernels(device: torch.device, given: str | Path | None, beside: Path | None = None) -> KernelFile | None:
    """Makes Triton use a kernels file on the GPU `device`: `given`, or else the first usable one in the folder `beside`.

    Returns it; None if there is none.

    A file that is damaged or made for another lowbit, Triton, Python or GPU is refused with a warning of one line; its kernels
    are then compiled when they are needed. A file in `beside` must also be one that this user compiled, since model files may
    come from anybody. Raises OSError if `given` cannot be read.
    """
    if given is not None:
        return _used(Path(given), device)
    files = sorted(beside.glob(PATTERN)) if beside is not None and beside.is_dir() else []
    if not files:
        return None
    from lowbit.kernels.kernel_file import is_trusted

    for path in files:
        if not is_trusted(path):
            logger.warning(f"{path}: is not used, since it was not compiled by this user; if you trust it, name it (--kernels)")
        elif (used := _used(path, device)) is not None:
            return used
    return None


def _used(path: Path, device: torch.device) -> KernelFile | None:
    from lowbit.kernels.kernel_file import KernelFile, KernelFileError

    machine = machine_of(device)
    try:
        file = KernelFile.open(path)
        refused = file.refusals(machine.arch.sm)
        if refused:
            raise KernelFileError(f"{path}: {'; '.join(refused)}")
        file.install(machine.arch.sm)
    except KernelFileError as error:
        logger.warning(f"{error}; kernels are compiled anew (lowbit compile makes another file)")
        return None
    if machine.product not in file.gpus:
        logger.warning(f"{path}: is for {' and '.join(file.gpus)}, this is {machine.product}: some kernels are compiled anew")
    return file
