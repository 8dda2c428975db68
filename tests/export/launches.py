"""Launches products of an exported library with tests/export/driver.c instead of CUDA's driver. Runs as a program, without
torch.

    python launches.py FOLDER DESCRIPTION

DESCRIPTION is JSON: the sizes of parameters of each cubin, and the calls of lowbit_multiply. Without calls, the library is only
opened. The driver prints each launch. The last line is the error of the last function, or "ok".
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    for name, sizes in given["cubins"].items():
        code = (folder / "cubins" / name).read_bytes()
        driver.register_cubin(code, ctypes.c_size_t(len(code)), len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    library = ctypes.CDLL(str(folder / "liblowbit_kernels.so"))
    library.lowbit_message.restype = library.lowbit_product.restype = ctypes.c_char_p
    library.lowbit_workspace_bytes.restype = ctypes.c_size_t
    handle = ctypes.c_void_p()
    error = library.lowbit_open(ctypes.byref(handle))
    for call in given["calls"] if not error else ():
        y, x, weight, form, workspace, m, n, k, stream = call
        addresses = [ctypes.c_uint64(each) for each in (y, x, weight)]
        print(json.dumps(library.lowbit_workspace_bytes(handle, n, k, m)), flush=True)
        error = library.lowbit_multiply(handle, *addresses, form, ctypes.c_uint64(workspace), m, n, k, ctypes.c_void_p(stream))
        if error:
            break
    print(json.dumps(library.lowbit_message().decode() if error else "ok"))
    if not error:
        print(json.dumps(library.lowbit_product(handle).decode()))
        library.lowbit_close(handle)


if __name__ == "__main__":
    main()
