# imagematrix asks this stage's `cc` which CPU flags the code will need.
FROM debian:trixie AS compiler
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends gcc-13 g++-13 libc6-dev; \
    for name in cc gcc; do ln -s /usr/bin/gcc-13 "/usr/local/bin/$name"; done; \
    for name in c++ g++; do ln -s /usr/bin/g++-13 "/usr/local/bin/$name"; done

FROM compiler AS source
RUN apt-get install -qy --no-install-recommends ca-certificates cmake git libopenblas-dev ninja-build python3-dev \
      python3-numpy python3-setuptools python3-typing-extensions python3-venv python3-wheel python3-yaml
WORKDIR /src
RUN set -eu; \
    git init -q .; \
    git fetch -q --depth 1 https://github.com/pytorch/pytorch.git 2236df1770800ffea5697b11b0bb0d910b2e59e1; \
    git checkout -q FETCH_HEAD; \
    test "$(git rev-parse HEAD)" = 2236df1770800ffea5697b11b0bb0d910b2e59e1; \
    git submodule update -q --init --recursive --depth 1 --jobs 8

FROM source AS wheel
# PyTorch's own kernels choose among AVX2 and AVX-512 when they run; all else uses what -march allows.
ENV CC=/usr/local/bin/cc CXX=/usr/local/bin/c++ CFLAGS="-O2 -march=x86-64-v3" CXXFLAGS="-O2 -march=x86-64-v3" \
    PYTORCH_BUILD_VERSION=2.6.0 PYTORCH_BUILD_NUMBER=1 \
    BLAS=OpenBLAS BUILD_TEST=0 USE_MPI=0 \
    USE_CUDA=0 USE_DISTRIBUTED=1 USE_NCCL=0
# NCCL comes with the source, as a submodule, and gets the same target.
RUN python3 setup.py bdist_wheel --dist-dir /wheels

# The wheel with what it depends on; numpy, for torch does without but its users don't.
FROM source AS environment
ENV CONDA_OVERRIDE_CUDA="" CONDA_OVERRIDE_CUDA_ARCH="" \
    CONDA_OVERRIDE_ARCHSPEC="x86_64_v3" \
    UV_TORCH_BACKEND="cpu"
COPY --from=wheel /wheels/ /wheels/
RUN python3 -m venv /opt/pytorch && \
    /opt/pytorch/bin/pip install --no-cache-dir --no-compile numpy==2.2.6 /wheels/*.whl

FROM debian:trixie AS body
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends libgomp1 libopenblas0 python3; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/*.log
ENV PATH=/opt/pytorch/bin:$PATH

FROM body
COPY --link --from=environment /opt/pytorch/ /opt/pytorch/
LABEL org.opencontainers.image.source="https://github.com/pytorch/pytorch.git" \
      org.opencontainers.image.revision="2236df1770800ffea5697b11b0bb0d910b2e59e1" \
      org.opencontainers.image.licenses="BSD-3-Clause"
CMD ["python3"]

ENV NVIDIA_VISIBLE_DEVICES=void
