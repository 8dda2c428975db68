"""Chooses the kernels file (kernels/kernel_file.py) that this process uses on a GPU. A file that cannot be used is refused with
a warning of one line.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowbit.hardware.machine import machine_of

if TYPE_CHECKING:
    from lowbit.kernels.kernel_file import KernelFile

logger = logging.getLogger(__name__)

PATTERN = "kernels-*.lowbit"
"""Pattern of the names of kernels files in a checkpoint's folder."""

GROUP = "lowbit.kernels"
"""Group of the entry points of packages that contain a kernels file (export/wheel.py), such as `sm90 = lowbit_kernels_sm90`."""

INSTALLED = "kernels.lowbit"
"""Name of the kernels file in an installed package of kernels."""

_in_use: dict[torch.device, KernelFile] = {}
"""The kernels file that this process uses on a GPU."""


def use_kernels(device: torch.device, given: str | Path | None, beside: Path | None = None) -> KernelFile | None:
    """Makes Triton use a kernels file on the GPU `device`, and returns it; None if no file can be used. The file is `given`, or
    the first usable one in the folder `beside`, or else the file of an installed package of kernels (`lowbit-kernels-sm90`).

    Without `given` and `beside`, a file that is in use already stays in use.

    A file that is damaged or made for another lowbit, Triton, Python or GPU is refused with a warning of one line; its kernels
    are then compiled when they are needed. A file in `beside` must also be one that this user compiled, since model files may
    come from anybody. Raises OSError if `given` cannot be read.
    """
    from lowbit.kernels.parts.launch import is_recording

    if is_recording():  # kernels of a simulated GPU are compiled and never launched, so that a file is of no use
        return None
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    if given is None and beside is None and device in _in_use:
        return _in_use[device]
    files = _beside(beside) if given is None else iter([Path(given)])
    for path in chain(files, _installed(device)):
        if (used := _used(path, device)) is not None:
            _in_use[device] = used
            return used
    return None


def _beside(folder: Path | None) -> Iterator[Path]:
    """Yields the kernels files in a folder that this user compiled."""
    files = sorted(folder.glob(PATTERN)) if folder is not None and folder.is_dir() else []
    if files:
        from lowbit.kernels.kernel_file import is_trusted

        for path in files:
            if is_trusted(path):
                yield path
            else:
                logger.warning(
                    f"{path}: is not used, since it was not compiled by this user; if you trust it, name it (--kernels)"
                )


def _installed(device: torch.device) -> Iterator[Path]:
    """Yields the kernels files of installed packages for the compute capability of `device`."""
    for entry in entry_points(group=GROUP, name=f"sm{machine_of(device).arch.sm}"):
        package = importlib.util.find_spec(entry.value)
        if package is not None and package.origin is not None:
            yield Path(package.origin).parent / INSTALLED


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
