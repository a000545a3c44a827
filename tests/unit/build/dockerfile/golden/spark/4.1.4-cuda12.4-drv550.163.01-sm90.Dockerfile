FROM debian:trixie AS environment
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends ca-certificates python3-setuptools python3-venv
COPY spark-4.1.4.txt /tmp/lock.txt
# The package is there as source only. Debian's setuptools build it, because pip would fetch its own unchecked.
RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    set -eu; \
    if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m venv /opt/spark; \
    PYTHONPATH=/usr/lib/python3/dist-packages \
      /opt/spark/bin/pip install --no-cache-dir --no-compile --no-build-isolation --require-hashes -r /tmp/lock.txt; \
    ln -s lib/python3.13/site-packages/pyspark /opt/spark/home

# Spark's own scripts want bash and ps.
FROM debian:trixie AS body
RUN apt-get update -q && \
    apt-get install -qy --no-install-recommends openjdk-21-jre-headless procps python3 && \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/*.log
# Workers ask for the version of Scala when they start an executor.
ENV PATH=/opt/spark/bin:$PATH SPARK_HOME=/opt/spark/home SPARK_SCALA_VERSION=2.13 PYSPARK_PYTHON=/opt/spark/bin/python3

# The example's code for the GPU.
FROM debian:trixie AS kernel
RUN set -eu; \
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do \
      if [ -e "$list" ]; then \
        sed -i -E '/^(deb |Components:)/s/ main.*$/ main contrib non-free/' "$list"; \
      fi; \
    done; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends libnvrtc12 python3
COPY compile.py squares.cu /src/
RUN set -eu; \
    mkdir /kernel; \
    python3 /src/compile.py /src/squares.cu sm_90 12.4 /kernel/squares.cubin

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
COPY --link --from=environment /opt/spark/ /opt/spark/
COPY --link --chmod=755 spark-node spark-gpus squares.py /usr/local/bin/
COPY --link --from=kernel /kernel/ /usr/local/share/squares/
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
LABEL org.opencontainers.image.source="https://github.com/apache/spark.git" \
      org.opencontainers.image.revision="v4.1.4" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["spark-node", "worker"]
# Last, so that images for other drivers differ in this layer only.
COPY --link --from=driver /driver/ /

ENV NVIDIA_VISIBLE_DEVICES=void
