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
      --config=cuda_clang --config=cuda_wheel --action_env=CLANG_CUDA_COMPILER_PATH=/usr/lib/llvm-18/bin/clang \
      --repo_env=HERMETIC_CUDA_VERSION=12.5.1 --repo_env=HERMETIC_CUDNN_VERSION=9.3.0 \
      --repo_env=TF_CUDA_COMPUTE_CAPABILITIES=sm_89 \
      --repo_env=HERMETIC_CUDA_COMPUTE_CAPABILITIES=sm_89 \
      --repo_env=WHEEL_NAME=tensorflow \
      //tensorflow/tools/pip_package:wheel; \
    mv bazel-bin/tensorflow/tools/pip_package/wheel_house /wheels

# NCCL for this GPU alone. Its CUDA runtime is linked into it, so its toolkit may be another than TensorFlow's.
FROM debian:trixie AS nccl-compiler
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends gcc-13 g++-13 libc6-dev; \
    ln -s /usr/bin/gcc-13 /usr/local/bin/cc; \
    ln -s /usr/bin/g++-13 /usr/local/bin/c++; \
    apt-get install -qy --no-install-recommends ca-certificates git make; \
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do \
      if [ -e "$list" ]; then \
        sed -i -E '/^(deb |Components:)/s/ main.*$/ main contrib non-free/' "$list"; \
      fi; \
    done; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends nvidia-cuda-toolkit; \
    case "$(nvcc --version)" in \
      *"release 12.4,"*) ;; \
      *) echo "the toolkit here is not CUDA 12.4:"; nvcc --version; exit 1 ;; \
    esac >&2
WORKDIR /nccl
RUN set -eu; \
    git init -q .; \
    git fetch -q --depth 1 https://github.com/NVIDIA/nccl.git 80f6bda4378b99d99e82b4d76a633791cc45fef0; \
    git checkout -q FETCH_HEAD; \
    test "$(git rev-parse HEAD)" = 80f6bda4378b99d99e82b4d76a633791cc45fef0

FROM nccl-compiler AS nccl
RUN make -j "$(nproc)" src.build CUDA_HOME=/usr CUDA_LIB="/usr/lib/$(uname -m)-linux-gnu" CXX=/usr/local/bin/c++ \
      CXXFLAGS="-O2 -march=x86-64-v3" NVCC_GENCODE="-gencode=arch=compute_89,code=sm_89"

# The wheel with what it depends on, and NVIDIA's libraries in place of which it would take any newer ones.
FROM source AS environment
COPY --from=wheel /wheels/ /wheels/
COPY cuda-12.5.txt ./
RUN python3 -m venv /opt/tensorflow && \
    /opt/tensorflow/bin/pip install --no-cache-dir --no-compile -r cuda-12.5.txt /wheels/*.whl
# TensorFlow looks for NCCL where NVIDIA's wheel would have put it.
COPY --from=nccl /nccl/build/lib/libnccl.so.2 /opt/tensorflow/lib/python3.13/site-packages/nvidia/nccl/lib/

FROM debian:trixie AS body
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends python3; \
    rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/tensorflow/bin:$PATH

FROM debian:trixie AS driver
WORKDIR /tmp/driver
RUN set -eu; \
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do \
      if [ -e "$list" ]; then \
        sed -i -E '/^(deb |Components:)/s/ main.*$/ main contrib non-free/' "$list"; \
      fi; \
    done; \
    apt-get update -q; \
    folder=usr/lib/$(uname -m)-linux-gnu; \
    mkdir -p "/driver/$folder"; \
    for package in libcuda1 libnvidia-ptxjitcompiler1 libnvidia-ml1; do \
      apt-get download -q "$package=550.163.01-*" || { \
        echo "debian:trixie has no $package 550.163.01, only:"; apt-cache madison "$package"; exit 1; \
      } >&2; \
      dpkg -x "$package"_*.deb .; \
    done; \
    cp -d "$folder"/nvidia/*/lib*.so.* "/driver/$folder"; \
    test -e "/driver/$folder/libcuda.so.550.163.01"; \
    find /driver -exec touch -h -d @0 {} +

FROM body AS linker-cache
COPY --from=driver /driver/ /
RUN ldconfig

FROM body
COPY --link --from=environment /opt/tensorflow/ /opt/tensorflow/
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
LABEL org.opencontainers.image.source="https://github.com/tensorflow/tensorflow.git" \
      org.opencontainers.image.revision="72fbba3d20f4616d7312b5e2b7f79daf6e82f2fa" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["python3"]
# Last, so that images for other drivers differ in this layer only.
COPY --link --from=driver /driver/ /
