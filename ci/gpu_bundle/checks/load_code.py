"""Load files of device code with the driver, one after the other: load_code.py LIBCUDA FOLDER.

It prints what the driver answers to each file: 0, or CUDA's error code.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path


def main() -> None:
    """Print the answers as JSON, by file name."""
    library, folder = sys.argv[1:]
    cuda = ctypes.CDLL(library)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for call, code in (
        ("cuInit", cuda.cuInit(0)),
        ("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), 0)),
        ("cuCtxCreate", cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)),
    ):
        if code:
            sys.exit(f"{call} answered {code}")
    answers = {path.name: _answer(cuda, path.read_bytes()) for path in sorted(Path(folder).iterdir())}
    print(json.dumps(answers))


def _answer(cuda: ctypes.CDLL, code: bytes) -> int:
    module = ctypes.c_void_p()
    answer: int = cuda.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(code))
    if answer == 0:
        cuda.cuModuleUnload(module)
    return answer


if __name__ == "__main__":
    main()
