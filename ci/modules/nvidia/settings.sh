# shellcheck shell=bash
# It loads NVIDIA's management library from C.
export CGO_ENABLED=1
