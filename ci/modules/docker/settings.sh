# shellcheck shell=bash disable=SC2034  # ci/modules/build uses the variables
# Docker's module has a version of its own; the newest API that it has is that of Docker 29.
values="github.com/moby/moby/v2/dockerversion.Version=29"
