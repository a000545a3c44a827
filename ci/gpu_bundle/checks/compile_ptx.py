"""Let the driver compile much PTX, which it keeps in CUDA_CACHE_PATH: compile_ptx.py LIBCUDA ISA TARGET."""

from __future__ import annotations

import ctypes
import sys

KERNELS, STEPS = 200, 500  # so many that compiling takes longer than all else
HEAD = ".version {isa}\n.target sm_{target}\n.address_size 64\n"
KERNEL = """\
.visible .entry kernel{number}(.param .u64 place) {{
    .reg .b64 %place;
    .reg .f32 %f<4>;
    ld.param.u64 %place, [place];
    cvta.to.global.u64 %place, %place;
    ld.global.f32 %f1, [%place];
    ld.global.f32 %f2, [%place+4];
    ld.global.f32 %f3, [%place+{offset}];
{steps}    st.global.f32 [%place], %f1;
    ret;
}}
"""
STEP = "    fma.rn.f32 %f1, %f1, %f2, %f3;\n"


def main() -> None:
    """Load the code; end with the call that failed, and the driver's answer."""
    library, isa, target = sys.argv[1:]
    kernels = (KERNEL.format(number=at, offset=8 + 4 * at, steps=STEP * STEPS) for at in range(KERNELS))
    code = (HEAD.format(isa=isa, target=target) + "".join(kernels)).encode()
    cuda = ctypes.CDLL(library)
    device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    for call, words in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuCtxCreate_v2", (ctypes.byref(context), 0, device)),
        ("cuModuleLoadData", (ctypes.byref(module), ctypes.c_char_p(code))),
    ):
        if answer := getattr(cuda, call)(*words):
            sys.exit(f"{call} answered {answer}")


if __name__ == "__main__":
    main()
