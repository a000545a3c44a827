"""compile.py SOURCE TARGET RELEASE FILE: compiles CUDA C++ to a cubin for one target (sm_89) with NVRTC.

It needs no headers and no host compiler. It fails unless the NVRTC here is of the CUDA release asked for.
"""

import ctypes
import sys
from pathlib import Path


def main(source, target, release, file):
    """Compile the file `source`, and write the cubin to `file`."""
    nvrtc = ctypes.CDLL(f"libnvrtc.so.{release.partition('.')[0]}")
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(name, *arguments):
        code = getattr(nvrtc, name)(*arguments)
        if code:
            raise SystemExit(f"{name}: {nvrtc.nvrtcGetErrorString(code).decode()}\n{log()}")

    def log():
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(size.value, 1))
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.value.decode()

    program = ctypes.c_void_p()
    major, minor = ctypes.c_int(), ctypes.c_int()
    call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    if f"{major.value}.{minor.value}" != release:
        raise SystemExit(f"NVRTC here is of CUDA {major.value}.{minor.value}, not {release}")
    text = Path(source).read_bytes()
    call("nvrtcCreateProgram", ctypes.byref(program), text, source.encode(), 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={target}".encode())
    call("nvrtcCompileProgram", program, len(options), options)
    size = ctypes.c_size_t()
    call("nvrtcGetCUBINSize", program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    call("nvrtcGetCUBIN", program, cubin)
    Path(file).write_bytes(cubin.raw)


main(*sys.argv[1:])
