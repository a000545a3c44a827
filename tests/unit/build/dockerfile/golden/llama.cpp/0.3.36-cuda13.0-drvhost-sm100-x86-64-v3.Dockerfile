# imagematrix asks this stage's `cc` which CPU flags the code will need.
FROM debian:trixie AS compiler
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends gcc-14 g++-14 libc6-dev; \
    for name in cc gcc; do ln -s /usr/bin/gcc-14 "/usr/local/bin/$name"; done; \
    for name in c++ g++; do ln -s /usr/bin/g++-14 "/usr/local/bin/$name"; done

FROM compiler AS source
RUN apt-get install -qy --no-install-recommends ca-certificates cmake ninja-build python3-venv
WORKDIR /src
COPY scikit-build-core.txt /tmp/
# To download an archive of sources, pip asks what it is built with (scikit-build-core), and builds nothing.
RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    set -eu; \
    if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /tmp/pip; \
    /tmp/pip/bin/pip install --no-cache-dir --only-binary=:all: --require-hashes -r /tmp/scikit-build-core.txt; \
    echo "llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e" > /tmp/sdist.txt; \
    /tmp/pip/bin/pip download --no-cache-dir --no-deps --no-binary=:all: --no-build-isolation --require-hashes \
      --dest /tmp -r /tmp/sdist.txt; \
    tar -xf /tmp/llama_cpp_python-0.3.36.tar.gz --strip-components=3 llama_cpp_python-0.3.36/vendor/llama.cpp; \
    rm /tmp/llama_cpp_python-0.3.36.tar.gz

FROM debian:trixie AS cuda
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends ca-certificates python3-venv gcc libc6-dev
RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    set -eu; \
    if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /tmp/pip; \
    { \
      echo "nvidia-cuda-cccl==13.0.85 --hash=sha256:6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649"; \
      echo "nvidia-cuda-crt==13.0.88 --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4 --hash=sha256:ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003"; \
      echo "nvidia-cuda-nvcc==13.0.88 --hash=sha256:56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03 --hash=sha256:c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f"; \
      echo "nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548 --hash=sha256:ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55"; \
      echo "nvidia-nvvm==13.0.88 --hash=sha256:c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1 --hash=sha256:c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0"; \
      echo "nvidia-cublas==13.1.1.3 --hash=sha256:37936a16db8fe4ac1f065c2139360608a543a09275cb1a1af612e08cfa065436 --hash=sha256:b7a210458267ac818974c53038fbec2e969d5c99f305ab15c72522fa9f001dd5"; \
      echo "nvidia-cuda-nvrtc==13.0.88 --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575 --hash=sha256:d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b"; \
    } > /tmp/wheels.txt; \
    sort -u -o /tmp/wheels.txt /tmp/wheels.txt; \
    /tmp/pip/bin/pip install --no-cache-dir --no-compile --no-deps --only-binary=:all: --require-hashes \
      --target /tmp/wheels -r /tmp/wheels.txt; \
    mkdir /cuda; \
    # Each wheel of 12 has a folder of its own, those of 13 share one.
    for folder in /tmp/wheels/nvidia/*/; do cp -al "$folder." /cuda; done; \
    ln -s lib /cuda/lib64; \
    # What a linker looks for: the names without versions.
    for library in /cuda/lib/lib*.so.*; do ln -sf "${library##*/}" "${library%%.so.*}.so"; done
# A libcuda to link with, which the wheels lack: it has the names of all functions, and they do nothing.
RUN set -eu; \
    mkdir /cuda/lib/stubs; \
    echo "#include <cuda.h>" > /tmp/cuda.c; \
    gcc -E -P -I/cuda/include -o /tmp/cuda.i /tmp/cuda.c; \
    sed -nE "s/^(extern )?CUresult +(cu[A-Za-z0-9_]+)\(.*/void \2(void) {}/p" /tmp/cuda.i > /tmp/libcuda.c; \
    gcc -shared -Wl,-soname,libcuda.so.1 -o /cuda/lib/stubs/libcuda.so /tmp/libcuda.c

# Which instructions the code uses is decided by -march alone. Of itself llama.cpp takes those of the builder
# (GGML_NATIVE) or, without, AVX2 and its like: then the labels would promise less than the code needs.
FROM source AS program
ENV CFLAGS="-O2 -march=x86-64-v3" CXXFLAGS="-O2 -march=x86-64-v3"
RUN --mount=type=bind,from=cuda,source=/cuda,target=/usr/local/cuda cmake -S . -B build -G Ninja \
      -D CMAKE_BUILD_TYPE=Release -D BUILD_SHARED_LIBS=OFF \
      -D GGML_NATIVE=OFF -D GGML_SSE42=OFF -D GGML_AVX=OFF -D GGML_AVX2=OFF -D GGML_BMI2=OFF -D GGML_FMA=OFF \
      -D GGML_F16C=OFF -D GGML_CCACHE=OFF \
      -D GGML_CUDA=ON -D GGML_CUDA_NCCL=OFF -D CMAKE_CUDA_ARCHITECTURES=100-real \
      -D CMAKE_CUDA_HOST_COMPILER=/usr/local/bin/c++ \
      -D CMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc \
      -D LLAMA_CURL=OFF -D LLAMA_OPENSSL=OFF -D LLAMA_BUILD_UI=OFF -D LLAMA_USE_PREBUILT_UI=OFF && \
    cmake --build build --target llama-server && \
    strip build/bin/llama-server

# What the server loads. Models are mounted or added: none is in the image.
FROM debian:trixie AS body
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends libgomp1; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/*.log
RUN echo /opt/nvidia-wheels/nvidia/cu13/lib > /etc/ld.so.conf.d/nvidia-wheels.conf

FROM debian:trixie AS wheels_pip
RUN set -eu; \
    if ! python3 -c "import ensurepip" 2> /dev/null; then \
      apt-get update -q; \
      apt-get install -qy --no-install-recommends ca-certificates python3-venv; \
    fi
RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    set -eu; \
    if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    echo "pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13" > /tmp/pip.txt; \
    python3 -m venv /tmp/pip; \
    /tmp/pip/bin/pip install --no-cache-dir --only-binary=:all: --require-hashes -r /tmp/pip.txt
COPY --chmod=755 <<"END" /usr/local/bin/install-wheels
#!/bin/sh
# Installs the wheels of /tmp/lock.txt for the environment $1 below /wheels, in the folder $2. If that is another one,
# it gets packages only. The paths $3... in it are left out.
set -eu
environment=$1 folder=$2
shift 2
if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
[ -e "$environment" ] || python3 -m venv --without-pip "$environment"
if [ "$environment" = "$folder" ]; then
  target=--root=/wheels
  site=/wheels$("$environment/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
else
  target=--target=/wheels$folder
  site=/wheels$folder
fi
mkdir -p "$site"
/tmp/pip/bin/pip --python "$environment" install --no-cache-dir --no-compile --no-deps --only-binary=:all: \
  --require-hashes --ignore-installed --no-warn-script-location --root-user-action=ignore "$target" -r /tmp/lock.txt
for info in "$site"/*.dist-info; do
  [ -e "$info" ] || continue  # the wheel is for other platforms
  # The files that say how it was installed, and paths as they were before pip moved the files to the folder.
  rm -f "$info/INSTALLER" "$info/REQUESTED" "$info/direct_url.json"
  sed -i -E '/^[^/]+\.dist-info\/(INSTALLER|REQUESTED|direct_url\.json),/d' "$info/RECORD"
  [ "$environment" = "$folder" ] || sed -i -E 's/^("?)\.\.\/\.\.\//\1/' "$info/RECORD"
done
for path; do
  rm -r "${site:?}/$path"
  sed -i "\#^$path[/,]#d" "$site"/*.dist-info/RECORD
done
if [ "$folder" != /opt/nvidia-wheels ] && [ -e "$site/nvidia" ]; then
  echo "wheels with files in nvidia/ belong into /opt/nvidia-wheels: see \`shared\` of debian.wheels" >&2
  exit 1
elif [ "$folder" = /opt/nvidia-wheels ] && [ -e "$site/bin" ]; then
  echo "wheels with programs belong into an environment: see \`shared\` of debian.wheels" >&2
  exit 1
fi
END

FROM wheels_pip AS wheels-nvidia-cublas
COPY <<"END" /tmp/lock.txt
nvidia-cublas==13.1.1.3 --hash=sha256:37936a16db8fe4ac1f065c2139360608a543a09275cb1a1af612e08cfa065436 --hash=sha256:b7a210458267ac818974c53038fbec2e969d5c99f305ab15c72522fa9f001dd5
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-cuda-nvrtc
COPY <<"END" /tmp/lock.txt
nvidia-cuda-nvrtc==13.0.88 --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575 --hash=sha256:d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels_nvidia
COPY <<"END" /tmp/lock.txt
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548 --hash=sha256:ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM body AS wheels
COPY --link --from=wheels_nvidia /wheels/ /
COPY --link --from=wheels-nvidia-cuda-nvrtc /wheels/ /
COPY --link --from=wheels-nvidia-cublas /wheels/ /


FROM scratch AS driver
WORKDIR /driver

FROM wheels AS linker-cache
COPY --from=driver /driver/ /
RUN ldconfig

FROM wheels
COPY --link --from=program /src/build/bin/llama-server /usr/local/bin/llama-server
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
LABEL org.opencontainers.image.source="https://github.com/ggml-org/llama.cpp.git" \
      org.opencontainers.image.revision="llama-cpp-python 0.3.36" \
      org.opencontainers.image.licenses="MIT"
EXPOSE 8080
ENTRYPOINT ["llama-server", "--host", "0.0.0.0"]
# Last, so that images for other drivers differ in this layer only.
COPY --link --from=driver /driver/ /
