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

FROM source AS toolkit
RUN set -eu; \
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

# cuDNN is in no Debian package. NVIDIA's wheel has headers and libraries, but not the name that linkers look for.
FROM source AS cudnn
RUN python3 -m venv /tmp/pip && \
    /tmp/pip/bin/pip install --no-cache-dir --no-deps --target /tmp/cudnn nvidia-cudnn-cu12==9.1.0.70 && \
    mv /tmp/cudnn/nvidia/cudnn /opt/cudnn && \
    ln -s libcudnn.so.9 /opt/cudnn/lib/libcudnn.so

FROM toolkit AS wheel
COPY --from=cudnn /opt/cudnn/ /opt/cudnn/
# PyTorch's own kernels choose among AVX2 and AVX-512 when they run; all else uses what -march allows.
ENV CC=/usr/local/bin/cc CXX=/usr/local/bin/c++ CFLAGS="-O2 -march=x86-64-v3" CXXFLAGS="-O2 -march=x86-64-v3" \
    PYTORCH_BUILD_VERSION=2.6.0 PYTORCH_BUILD_NUMBER=1 \
    BLAS=OpenBLAS BUILD_TEST=0 USE_MPI=0 \
    USE_CUDA=1 CUDA_HOME=/usr CUDAHOSTCXX=/usr/local/bin/c++ TORCH_CUDA_ARCH_LIST="8.9" \
    USE_CUDNN=1 CUDNN_INCLUDE_DIR=/opt/cudnn/include CUDNN_LIBRARY=/opt/cudnn/lib/libcudnn.so \
    USE_DISTRIBUTED=1 USE_NCCL=1 USE_SYSTEM_NCCL=0
# NCCL comes with the source, as a submodule, and gets the same target.
RUN python3 setup.py bdist_wheel --dist-dir /wheels

# The wheel with what it depends on; numpy, for torch does without but its users don't.
FROM source AS environment
ENV CONDA_OVERRIDE_CUDA="12.4" CONDA_OVERRIDE_CUDA_ARCH="8.9" \
    CONDA_OVERRIDE_ARCHSPEC="x86_64_v3" \
    UV_TORCH_BACKEND="cu124" \
    NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION="12.4" \
    NV_VARIANT_PROVIDER_FORCE_SM_ARCH="8.9"
COPY --from=wheel /wheels/ /wheels/
RUN python3 -m venv /opt/pytorch && \
    /opt/pytorch/bin/pip install --no-cache-dir --no-compile numpy==2.2.6 /wheels/*.whl

FROM debian:trixie AS body
RUN set -eu; \
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do \
      if [ -e "$list" ]; then \
        sed -i -E '/^(deb |Components:)/s/ main.*$/ main contrib non-free/' "$list"; \
      fi; \
    done; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends libgomp1 libopenblas0 python3 libcublas12 libcudart12 libcufft11 libcupti12 libcurand10 libcusolver11 libcusparse12 libnvjitlink12 libnvrtc12 libnvtoolsext1; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/*.log
ENV PATH=/opt/pytorch/bin:$PATH
COPY --link --from=cudnn /opt/cudnn/lib/ /usr/local/lib/

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
COPY --link --from=environment /opt/pytorch/ /opt/pytorch/
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
LABEL org.opencontainers.image.source="https://github.com/pytorch/pytorch.git" \
      org.opencontainers.image.revision="2236df1770800ffea5697b11b0bb0d910b2e59e1" \
      org.opencontainers.image.licenses="BSD-3-Clause"
CMD ["python3"]
# Last, so that images for other drivers differ in this layer only.
COPY --link --from=driver /driver/ /

ENV NVIDIA_VISIBLE_DEVICES=void
