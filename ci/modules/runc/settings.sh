# shellcheck shell=bash
# runc enters namespaces in C. Docker's default profile needs seccomp.
export CGO_ENABLED=1 GOFLAGS=-tags=seccomp
