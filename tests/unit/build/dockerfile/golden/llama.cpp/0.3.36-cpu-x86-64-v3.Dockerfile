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

# Which instructions the code uses is decided by -march alone. Of itself llama.cpp takes those of the builder
# (GGML_NATIVE) or, without, AVX2 and its like: then the labels would promise less than the code needs.
FROM source AS program
ENV CFLAGS="-O2 -march=x86-64-v3" CXXFLAGS="-O2 -march=x86-64-v3"
RUN cmake -S . -B build -G Ninja \
      -D CMAKE_BUILD_TYPE=Release -D BUILD_SHARED_LIBS=OFF \
      -D GGML_NATIVE=OFF -D GGML_SSE42=OFF -D GGML_AVX=OFF -D GGML_AVX2=OFF -D GGML_BMI2=OFF -D GGML_FMA=OFF \
      -D GGML_F16C=OFF -D GGML_CCACHE=OFF \
      -D LLAMA_CURL=OFF -D LLAMA_OPENSSL=OFF -D LLAMA_BUILD_UI=OFF -D LLAMA_USE_PREBUILT_UI=OFF && \
    cmake --build build --target llama-server && \
    strip build/bin/llama-server

# What the server loads. Models are mounted or added: none is in the image.
FROM debian:trixie AS body
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends libgomp1; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/*.log

FROM body
COPY --link --from=program /src/build/bin/llama-server /usr/local/bin/llama-server
LABEL org.opencontainers.image.source="https://github.com/ggml-org/llama.cpp.git" \
      org.opencontainers.image.revision="llama-cpp-python 0.3.36" \
      org.opencontainers.image.licenses="MIT"
EXPOSE 8080
ENTRYPOINT ["llama-server", "--host", "0.0.0.0"]

ENV NVIDIA_VISIBLE_DEVICES=void
