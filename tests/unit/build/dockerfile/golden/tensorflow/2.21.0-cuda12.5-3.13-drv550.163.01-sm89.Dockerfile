FROM debian:trixie AS body
# Debian's pip looks for certificates where ca-certificates has them.
RUN apt-get update -q && \
    apt-get install -qy --no-install-recommends ca-certificates python3 && \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/*.log
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

FROM wheels_pip AS wheels-nvidia-cublas-cu12
COPY <<"END" /tmp/lock.txt
nvidia-cublas-cu12==12.5.3.2 --hash=sha256:ca070ad70e9fa6654084575d01bd001f30cc4665e33d4bb9fc8e0f321caa034b
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-cuda-nvcc-cu12
COPY <<"END" /tmp/lock.txt
nvidia-cuda-nvcc-cu12==12.5.82 --hash=sha256:b03e545b8e8c3ce7ebcd7fc44063180ff52ff01d064ece2127ed90a04ef12cd0
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-cuda-nvrtc-cu12
COPY <<"END" /tmp/lock.txt
nvidia-cuda-nvrtc-cu12==12.5.82 --hash=sha256:3dbd97b0104b4bfbc3c4f8c79cd2496307c89c43c29a9f83125f1d76296ff3fd
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-cudnn-cu12
COPY <<"END" /tmp/lock.txt
nvidia-cudnn-cu12==9.3.0.75 --hash=sha256:9ad9c6929ebb5295eb4a1728024666d1c88283373e265a0c5c883e6f9d5cd76d
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-cufft-cu12
COPY <<"END" /tmp/lock.txt
nvidia-cufft-cu12==11.2.3.61 --hash=sha256:9a6e8df162585750f61983a638104a48c756aa13f9f48e19ab079b38e3c828b8
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-curand-cu12
COPY <<"END" /tmp/lock.txt
nvidia-curand-cu12==10.3.6.82 --hash=sha256:2823fb27de4e44dbb22394a6adf53aa6e1b013aca0f8c22867d1cfae58405536
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-cusolver-cu12
COPY <<"END" /tmp/lock.txt
nvidia-cusolver-cu12==11.6.3.83 --hash=sha256:93cfafacde4428b71778eeb092ec615a02a3d05404da1bcf91c53e3fa1bce42b
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-cusparse-cu12
COPY <<"END" /tmp/lock.txt
nvidia-cusparse-cu12==12.5.1.3 --hash=sha256:016df8e993c437e8301e62739f01775cba988fd5253cd4c64173f8e8d2f8e752
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-nccl-cu12
COPY <<"END" /tmp/lock.txt
nvidia-nccl-cu12==2.27.7 --hash=sha256:de5ba5562f08029a19cb1cd659404b18411ed0d6c90ac5f52f30bf99ad5809aa
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-nvidia-nvjitlink-cu12
COPY <<"END" /tmp/lock.txt
nvidia-nvjitlink-cu12==12.5.82 --hash=sha256:f9b37bc5c8cf7509665cb6ada5aaa0ce65618f2332b7d3e78e9790511f111212
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels_nvidia
COPY <<"END" /tmp/lock.txt
nvidia-cuda-cupti-cu12==12.5.82 --hash=sha256:bde77a5feb66752ec61db2adfe47f56b941842825b4c7e2068aff27c9d107953
nvidia-cuda-runtime-cu12==12.5.82 --hash=sha256:3e79a060e126df40fd3a068f3f787eb000fa51b251ec6cd97d09579632687115
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /tmp/pip /opt/nvidia-wheels

FROM wheels_pip AS wheels-libclang
COPY <<"END" /tmp/lock.txt
libclang==18.1.1 --hash=sha256:c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/tensorflow /opt/tensorflow

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 8.9 /wheels

FROM wheels_pip AS wheels-numpy
COPY <<"END" /tmp/lock.txt
numpy==2.4.3 --hash=sha256:d5f51900414fc9204a0e0da158ba2ac52b75656e7dce7e77fb9f84bfa343b4cc
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/tensorflow /opt/tensorflow

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 8.9 /wheels

FROM wheels_pip AS wheels-tensorflow
COPY <<"END" /tmp/lock.txt
tensorflow==2.21.0 --hash=sha256:e9d8da8dcab9650efb45f032ba70af2f016f907e6e0c6bda29dd101bba945406
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/tensorflow /opt/tensorflow

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 8.9 /wheels

FROM wheels_pip AS wheels_others
COPY <<"END" /tmp/lock.txt
absl-py==2.4.0 --hash=sha256:88476fd881ca8aab94ffa78b7b6c632a782ab3ba1cd19c9bd423abc4fb4cd28d
astunparse==1.6.3 --hash=sha256:c2652417f2c8b5bb325c885ae329bdf3f86424075c4fd1a128674bc6fba4b8e8
certifi==2026.2.25 --hash=sha256:027692e4402ad994f1c42e52a4997a9763c646b73e4096e4d5d6db8af1d6f0fa
charset-normalizer==3.4.6 --hash=sha256:530e8cebeea0d76bdcf93357aa5e41336f48c3dc709ac52da2bb167c5b8271d9
flatbuffers==25.12.19 --hash=sha256:7634f50c427838bb021c2d66a3d1168e9d199b0607e6329399f04846d42e20b4
gast==0.7.0 --hash=sha256:99cbf1365633a74099f69c59bd650476b96baa5ef196fec88032b00b31ba36f7
google-pasta==0.2.0 --hash=sha256:b32482794a366b5366a32c92a9a9201b107821889935a02b3e51f6b432ea84ed
grpcio==1.78.0 --hash=sha256:735e38e176a88ce41840c21bb49098ab66177c64c82426e24e0082500cc68af5
h5py==3.14.0 --hash=sha256:d90e6445ab7c146d7f7981b11895d70bc1dd91278a4f9f9028bc0c95e4a53f13
idna==3.11 --hash=sha256:771a87f49d9defaf64091e6e6fe9c18d4833f140bd19464795bc32d966ca37ea
keras==3.13.2 --hash=sha256:14b2afc0f9c636cc295d28efc36aae42fc52e7b892c950eec33f3befe4d22fb5
markdown-it-py==4.0.0 --hash=sha256:87327c59b172c5011896038353a81343b6754500a08cd7a4973bb48c6d578147
mdurl==0.1.2 --hash=sha256:84008a41e51615a49fc9966191ff91509e3c40b939176e643fd50a5c2196b8f8
ml-dtypes==0.5.4 --hash=sha256:533ce891ba774eabf607172254f2e7260ba5f57bdd64030c9a4fcfbd99815d0d
namex==0.1.0 --hash=sha256:e2012a474502f1e2251267062aae3114611f07df4224b6e06334c57b0f2ce87c
opt-einsum==3.4.0 --hash=sha256:69bb92469f86a1565195ece4ac0323943e83477171b91d24c35afe028a90d7cd
optree==0.19.0 --hash=sha256:37e07a5233be64329cbf41e20ab07c50da53bdc374109a2b376be49c4a34a37f
packaging==26.0 --hash=sha256:b36f1fef9334a5588b4166f8bcd26a14e521f2b55e6b9de3aaa80d3ff7a37529
protobuf==6.33.6 --hash=sha256:e9db7e292e0ab79dd108d7f1a94fe31601ce1ee3f7b79e0692043423020b0593
pygments==2.19.2 --hash=sha256:86540386c03d588bb81d44bc3928634ff26449851e99741617ecb9037ee5ec0b
requests==2.32.5 --hash=sha256:2462f94637a34fd532264295e186976db0f5d453d1cdd31473c85a6a161affb6
rich==14.3.3 --hash=sha256:793431c1f8619afa7d3b52b2cdec859562b950ea0d4b6b505397612db8d5362d
setuptools==82.0.1 --hash=sha256:a59e362652f08dcd477c78bb6e7bd9d80a7995bc73ce773050228a348ce2e5bb
six==1.17.0 --hash=sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274
termcolor==3.3.0 --hash=sha256:cf642efadaf0a8ebbbf4bc7a31cec2f9b5f21a9f726f4ccbb08192c9c26f43a5
typing-extensions==4.15.0 --hash=sha256:f0fa19c6845758ab08074a0cfa8b7aecb71c999ca73d62883bc25cc018c4e548
urllib3==2.6.3 --hash=sha256:bf272323e553dfb2e87d9bfd225ca7b0f467b919d7bbd355436d3fd37cb0acd4
wheel==0.46.3 --hash=sha256:4b399d56c9d9338230118d705d9737a2a468ccca63d5e813e2a4fc7815d8bc4d
wrapt==2.1.2 --hash=sha256:bbac24d879aa22998e87f6b3f481a5216311e7d53c7db87f189a7a0266dafffb
pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/tensorflow /opt/tensorflow

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 8.9 /wheels
RUN set -eu; \
    cp -a /opt/tensorflow/. /wheels/opt/tensorflow; \
    site=/wheels$(/opt/tensorflow/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
    # Libraries are loaded through the link, and packages found through the .pth file.
    ln -s /opt/nvidia-wheels/nvidia "$site/nvidia"; \
    echo /opt/nvidia-wheels > "$site/nvidia-wheels.pth"

FROM body AS wheels
COPY --link --from=wheels_nvidia /wheels/ /
COPY --link --from=wheels-nvidia-cuda-nvcc-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-nvjitlink-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-curand-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-cuda-nvrtc-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-cufft-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-cusolver-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-cusparse-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-nccl-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-cublas-cu12 /wheels/ /
COPY --link --from=wheels-nvidia-cudnn-cu12 /wheels/ /
COPY --link --from=wheels_others /wheels/ /
COPY --link --from=wheels-numpy /wheels/ /
COPY --link --from=wheels-libclang /wheels/ /
COPY --link --from=wheels-tensorflow /wheels/ /

COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
LABEL org.opencontainers.image.source="https://github.com/tensorflow/tensorflow.git" \
      org.opencontainers.image.revision="v2.21.0" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["python3"]
# Last, so that images for other drivers differ in this layer only.
COPY --link --from=driver /driver/ /

ENV NVIDIA_VISIBLE_DEVICES=void
