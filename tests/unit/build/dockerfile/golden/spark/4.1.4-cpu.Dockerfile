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

FROM body
COPY --link --from=environment /opt/spark/ /opt/spark/
COPY --link --chmod=755 spark-node spark-gpus squares.py /usr/local/bin/
LABEL org.opencontainers.image.source="https://github.com/apache/spark.git" \
      org.opencontainers.image.revision="v4.1.4" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["spark-node", "worker"]

ENV NVIDIA_VISIBLE_DEVICES=void
