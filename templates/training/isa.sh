#!/bin/sh
# Prints a C++ header with what the compiler takes for granted under -march=$1: the instruction sets it
# predefines a macro for, less what it would have with none at all.
set -eu
predefined() {
    g++ "$@" -dM -E -x c++ /dev/null |
        sed -n 's/^#define __\([A-Z0-9_]*[A-Z0-9]\)_* 1$/\1/p' |
        grep -Ev '^(FLT16|FP_FAST|GCC|STDC)_|_(MATH|WITH_SSE)$' |
        LC_ALL=C sort
}
none=$(predefined -mgeneral-regs-only)
isa=$(predefined "-march=$1" | grep -Fvx "$none" | tr '\n' ' ')
printf '#pragma once\n#define TRAIN_MARCH "%s"\n#define TRAIN_ISA "%s"\n' "$1" "${isa% }"
