FROM debian:trixie AS environment
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends ca-certificates python3-venv
COPY torch-2.8.0-python3.13.txt /tmp/lock.txt
# NVIDIA's libraries have a layer of their own: it is the same for every GPU.
RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    set -eu; \
    if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/pytorch; \
    /opt/pytorch/bin/pip install --no-cache-dir --no-compile --only-binary=:all: --require-hashes -r /tmp/lock.txt; \
    mv /opt/pytorch/lib/python3.13/site-packages/nvidia /nvidia
RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /opt/pytorch

FROM debian:trixie AS body
# Debian's pip looks for certificates where ca-certificates has them.
RUN apt-get update -q && \
    apt-get install -qy --no-install-recommends ca-certificates libgomp1 python3 && \
    rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/pytorch/bin:$PATH

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
COPY --link --from=environment /nvidia/ /opt/pytorch/lib/python3.13/site-packages/nvidia/
COPY --link --from=environment /opt/pytorch/ /opt/pytorch/
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
LABEL org.opencontainers.image.source="https://github.com/pytorch/pytorch.git" \
      org.opencontainers.image.revision="v2.8.0" \
      org.opencontainers.image.licenses="BSD-3-Clause"
CMD ["python3"]
# Last, so that images for other drivers differ in this layer only.
COPY --link --from=driver /driver/ /
