# imagematrix asks this stage's `cc` which CPU flags the code will need.
FROM debian:trixie AS compiler
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends clang-18 lld-18 libc6-dev \
      libstdc++-14-dev; \
    ln -s /usr/lib/llvm-18/bin/clang /usr/local/bin/cc

FROM compiler AS source
RUN apt-get install -qy --no-install-recommends ca-certificates curl git patchelf python3-venv unzip zip
RUN curl -fsSL -o /usr/local/bin/bazel \
      https://github.com/bazelbuild/bazel/releases/download/7.4.1/bazel-7.4.1-linux-x86_64 && \
    echo "c97f02133adce63f0c28678ac1f21d65fa8255c80429b588aeeba8a1fac6202b  /usr/local/bin/bazel" > /tmp/bazel.sha256 && \
    sha256sum -c /tmp/bazel.sha256 && \
    chmod 755 /usr/local/bin/bazel
WORKDIR /src
RUN set -eu; \
    git init -q .; \
    git fetch -q --depth 1 https://github.com/tensorflow/tensorflow.git 72fbba3d20f4616d7312b5e2b7f79daf6e82f2fa; \
    git checkout -q FETCH_HEAD; \
    test "$(git rev-parse HEAD)" = 72fbba3d20f4616d7312b5e2b7f79daf6e82f2fa

# Bazel brings Python, CUDA and cuDNN itself. --copt reaches the code of the image, not the tools that are built on
# the way: those have to run on the builder. Of the two names for the GPU's targets HERMETIC_CUDA_COMPUTE_CAPABILITIES
# is the stronger, and TensorFlow's .bazelrc sets it.
FROM source AS wheel
RUN set -eu; \
    compiler=; \
    # Sources that bring a compiler of their own have to be told to take this one.
    if grep -q '^[a-z]*:clang_local ' .bazelrc; then compiler=--config=clang_local; fi; \
    bazel build $compiler --repo_env=CC=/usr/lib/llvm-18/bin/clang --repo_env=BAZEL_COMPILER=/usr/lib/llvm-18/bin/clang \
      --repo_env=HERMETIC_PYTHON_VERSION=3.13 --linkopt=-fuse-ld=lld --linkopt=-Wl,--undefined-version \
      --copt=-Wno-gnu-offsetof-extensions --copt=-Wno-error=unused-command-line-argument \
      --copt=-march=x86-64-v3 \
      --config=nonccl --repo_env=WHEEL_NAME=tensorflow_cpu \
      //tensorflow/tools/pip_package:wheel; \
    mv bazel-bin/tensorflow/tools/pip_package/wheel_house /wheels

# The wheel with what it depends on.
FROM source AS environment
COPY --from=wheel /wheels/ /wheels/
RUN python3 -m venv /opt/tensorflow && \
    /opt/tensorflow/bin/pip install --no-cache-dir --no-compile /wheels/*.whl

FROM debian:trixie AS body
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends python3; \
    rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/tensorflow/bin:$PATH

FROM body
COPY --link --from=environment /opt/tensorflow/ /opt/tensorflow/
LABEL org.opencontainers.image.source="https://github.com/tensorflow/tensorflow.git" \
      org.opencontainers.image.revision="72fbba3d20f4616d7312b5e2b7f79daf6e82f2fa" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["python3"]
