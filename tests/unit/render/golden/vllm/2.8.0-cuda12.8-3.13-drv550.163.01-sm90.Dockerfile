FROM pytorch:v1 AS environment
COPY vllm-0.11.0-python3.13.txt /tmp/lock.txt
RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    set -eu; \
    if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    pip install --no-cache-dir --no-compile --no-deps --only-binary=:all: --require-hashes --target=/opt/vllm \
      -r /tmp/lock.txt
WORKDIR /opt/vllm
# Numba's tests have code for no GPU of today.
RUN rm -r numba/cuda/tests vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so
RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /opt/vllm

FROM pytorch:v1
# Triton compiles code for the CPU that starts its kernels.
RUN apt-get update -q && \
    apt-get install -qy --no-install-recommends gcc libc6-dev python3-dev && \
    rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/vllm/bin:$PATH PYTHONPATH=/opt/vllm
COPY --link --from=environment /opt/vllm/ /opt/vllm/
LABEL org.opencontainers.image.source="https://github.com/vllm-project/vllm.git" \
      org.opencontainers.image.revision="v0.11.0" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["vllm", "serve"]
