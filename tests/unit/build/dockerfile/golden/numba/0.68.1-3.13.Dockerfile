FROM debian:trixie AS body
RUN apt-get update -q && \
    apt-get install -qy --no-install-recommends ca-certificates python3 && \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/*.log
ENV PATH=/opt/numba/bin:$PATH
RUN install -d -m 1777 /var/cache/warm
ENV TORCHINDUCTOR_CACHE_DIR=/var/cache/warm/inductor \
    TRITON_CACHE_DIR=/var/cache/warm/triton \
    VLLM_CACHE_ROOT=/var/cache/warm/vllm \
    FLASHINFER_WORKSPACE_BASE=/var/cache/warm/flashinfer \
    CUDA_CACHE_PATH=/var/cache/warm/cuda \
    JAX_COMPILATION_CACHE_DIR=/var/cache/warm/jax \
    NUMBA_CACHE_DIR=/var/cache/warm/numba \
    WARP_CACHE_PATH=/var/cache/warm/warp \
    CUPY_CACHE_DIR=/var/cache/warm/cupy \
    TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0 \
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

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

FROM wheels_pip AS wheels-llvmlite
COPY <<"END" /tmp/lock.txt
llvmlite==0.50.0 --hash=sha256:0225351ad77ea30501fc5b4c09ff6868169fde50c5a576cdfda1645091157616 --hash=sha256:1cb21c420a47dcfa56223228d013c6f9d234e05e06e6819a41638d78bbd78e6c --hash=sha256:211da1b088d566aafa1e444d546f64fc7f13b1af56ff0207a1705d88607be6ab --hash=sha256:266a6a29be71c3e3a22960ddcedf66b4e0388e5abb6cc4991cc093d6df402ad7 --hash=sha256:33ddf12b1e12d7e551e1c1e6ca8087d0aacc931f480019eb33ef2ab77681da4d --hash=sha256:3f490c0f4800c8ddeee6a607acd037497bf6508586804f4e2f11f53a1ee7fe2d --hash=sha256:423c8d89d13f7eb4488933d5a86b0fa952927956298cfd0087f6753b5123b5df --hash=sha256:425845f415a06dc50db08db033c6b568e0d85c4937e932c605a4d49e1514b2da --hash=sha256:4b78a8b669eda09ca1ff4c1a75003023912092974d3e771d1da0777f1b383bdf --hash=sha256:4da0e8c6e6f144b433672a632f75d6b4da7bd4fdb5c3e9981d6ea6741319aeae --hash=sha256:51a4a716db98591f0a1bea34c6548cdb4017731ee5e678ded8cf842dca8af3c5 --hash=sha256:55f50a6b7c0b8de88b05d6bc407d70a60486ce024013997dc97e202bd187c75b --hash=sha256:6e8df54380110ea5e9127386e739d2b0829cc6dfa4a24a9195226336c91b06d5 --hash=sha256:7ae211012c6849528a5f7cd17a78d8b2421a2813c7b4184d6c0b2ffa89a7d296 --hash=sha256:7dde9836d144c446a303b57b2dd906c35308411eb07f1279c1db581d3d774048 --hash=sha256:818b3d4845ac8e126e23cb500867570d0602a42a43e67b14acec31f046e03130 --hash=sha256:944133e9621d1dfbfdaf0fed3234b99f85e6ba27c38f4045acc8f8a5e699a5c0 --hash=sha256:987600ce6f7bd6d808f4bb0ea61a8eff2fd17cf32355691e801eb0a65a7304f0 --hash=sha256:a1d5b6eac064f201b4aa091030282e6f240d8d322dddd7381840731455c3e664 --hash=sha256:a32980e3d727b0e56974ad89d0764920048602a75805b8917cc0298e798b0ced --hash=sha256:a6ffde00d4be8772a24e3e8b3af6bf86a79e7cf066d944ef56136b3957d707dc --hash=sha256:accfc36951230e0e694b41bbfc96ba554284e72f0eab2dde0cf273e4109e51ba --hash=sha256:afd7b438c60e0f60c4368ec603bb9f20d938a203b5f59b80bbe50c749b4b2f16 --hash=sha256:c20595cc3a76e3c85140fdafbf9246c732ddf8e0e646ba2f4e4881f87567300d --hash=sha256:c2b23236bd0d7ad56a94208263d791956f79c8c45f39458931df556206d4496a --hash=sha256:c7d4e2bbb29a860a6e85e22afdb96696241263942a5b214cac3e4b704e1d3abf --hash=sha256:cda14ab787e609c2c2c5d1386a6d5f8723e9d047d27341585f606c27dc5744ab --hash=sha256:d501e5103076b9a14be885d2574dc2f6793171aa54a853d1244e011d476f1399 --hash=sha256:d5447a6c39171368edfe28a71f605e6e3edd40a1dc31f5e5c9d50585718ae6d0 --hash=sha256:d88c9b325f5fbefc79d95b1daa8fb96018c40bd2958103eea7334e6c8f17fb40 --hash=sha256:e8cc203c1fd509131cd72b7554413d4a3e5527cc5558c5a7ebe19840018c57c1 --hash=sha256:e94f9066f1257a9cef6c832e6c9de0f140e2bb150de2db39f657b2a5996e0f6b --hash=sha256:ecdc9fae295da8ac793578a27020515e24d970513143efa227e696582aeb16e6 --hash=sha256:f1ac2b9f699c46219fbbd66b304105f5e1b218f05ffac6fe03cd851f93718e58 --hash=sha256:f2a2cd6ec9ffcc1b7147dea0d7a49efebf17a2b434e0c2844fe175999d571eb4 --hash=sha256:ffe46ef508df226e54b5fe1f7bf11122e5297bcdbb3902cc5b670a429d56ff47
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/numba /opt/numba

FROM wheels_pip AS wheels-numpy
COPY <<"END" /tmp/lock.txt
numpy==2.5.5 --hash=sha256:08f1b9abf1707fa89c125aaa17e78389c063fb20ce37a141b47821e996f4a1db --hash=sha256:095113ee2ceab6a9501b184eff5ea806973d3a63d74a8cbc15e4911e754da9c1 --hash=sha256:10396f7c5ebc37d8f3cbdec44e3313912ccc2dc5841cc905de5de54ebbe8e2d3 --hash=sha256:178cb1eaed819b2cb4e398c554b0776d1499f307e30cb58b9bae1921de35dae6 --hash=sha256:1c24be6a82f5f257afc4dbefde4c3b56dee02146dfed2be2811940e79576b237 --hash=sha256:20145b11776d2f7570cd61351b156a51d3a341822282095baa819d87272bc710 --hash=sha256:228e3d90e967495d61ddc79dd64e95267aae3bcf1b1c516a6186429106a0b444 --hash=sha256:229743571f901a082f031f511dc4f926b4b4a714075d98b1ff2af62d836365ac --hash=sha256:263b2aa236d752b18f90c5107137d24b2e3856d7db37725609f0ab5bcdb58881 --hash=sha256:2a9c502cdb9a3050ac1686774624cc278658b11f72e11b971a3a8542d6ded357 --hash=sha256:2abd39cfbb3d2af11e9bc8cc92b08cd089b0975fe9b1a30c8b7c740c67d397ce --hash=sha256:2efb2ae4e0414b6bd636dde7235c158cd65dd52891ff64a320a4847a8ce7400f --hash=sha256:31e5be6cd4b896004cb9e416741612ade530fc9a04bceca5219cf66a675113b4 --hash=sha256:32dce94d74bb4d5bb058d65b0d9dad7fa61d07ff9375fd7695d8aa7ea82ee73d --hash=sha256:3cedc2980b45794a6a2cfee9c8c3a80f04517082cc1d387e4cc895506c481696 --hash=sha256:3d59ab8f6bfc4ffd29b0f558450e17922c1bc88459882e37726fbcd5834afbfd --hash=sha256:410eab02c6718cb42d06ccbb8604659f3522d2ce06ae70cacd5042092659f5af --hash=sha256:4302902ebf82d37f446664757be59db53587822c8b35f16368ca69fe66ec4315 --hash=sha256:479e43c183049ec1a820eeb36549e493924f56b3e893a1d5865d0fff12abad47 --hash=sha256:567994389edd2963b643d63d826138402a63401176f1daf84dbb3204eb838b39 --hash=sha256:5cddc243c75114ba845f01b1f87aca1572dbf7b6c2d88636ed3e1d2bccd7f1bf --hash=sha256:5e202d5facc9c0681834018062466d0b3eabd48c540c3570f72905c97f641a90 --hash=sha256:704d819265e5d1064d932968e9ee85fff2103ccc78c05b878c06943ba27b8507 --hash=sha256:7ca51125c76817de53473dae31ddc17213776472761bea9cca68a1a0037a4827 --hash=sha256:7da9a248f149cfbb220c6da964a59c8d051d516704f7758acfb81eb382a05d97 --hash=sha256:7e71ac4284c700afa654e2d15b1b174166710dca932f24045e5dc92001b5bda0 --hash=sha256:7fb87c4bcc73850ef433a0c42f096b010d3d3d284e9d00028bb030b43df3d078 --hash=sha256:824025655df929268bfe6b47ed91a00d14209a6f760847cf150be446829e1ce4 --hash=sha256:84dfb1611993a3525b250c955b1e2ebab6ce0ed36e4ab4dd5746432dd362fb5d --hash=sha256:86868185bf4b6c4e5a8628ac42cfa165cd9530266c731f7dd1d11b4ad7e7cd1c --hash=sha256:919eb420662b0b4ba34889df503f3d5329775b0c1d5f7e5f5af4fba8315b1e30 --hash=sha256:9c3e1ac3cd5d3329f4d38709ff4c21f0621bbe8779c094d6de8ec8347246fcdc --hash=sha256:9f44875964889bd9088cf838d191b58c04088d10b4dc9b140e9da2431ecfbb60 --hash=sha256:a0750f2156d53446caca85663d0b65d67214e1664b9050454a731ea1418d176a --hash=sha256:a207eb88a18e30add597c366c1db7e79f48fc94084b8e7dbd0eefb95a645db12 --hash=sha256:a3856a97e48ed8371c680fb04120b99fbcc29f2076ebe6dc3deb34f77947c5ca --hash=sha256:ab3ff087826c49d07953d0219eb00663ce5b1a0ef0a6b757e1ac041b09387428 --hash=sha256:ac910558645a4b006f70596b450712b8564730c1b2ac10291fcedd656d321ec0 --hash=sha256:ad0c8b963f9281f2eb118e283eb61964c716c8e344ed8e8c309b49c586d41ed1 --hash=sha256:ae2b8285d0b4eed24739c3ca9ec0fa424a0247489c01e1d5fe2815a599e11d33 --hash=sha256:ae9cfe4e985139c5f2db69d4310de7348bd0abc02cfdc06991c4419065f6fdca --hash=sha256:b3d328eebe0056c634878c251131d73d74e0c4af317a3aea718816d6fa0bb963 --hash=sha256:b5d08742de581c9eb61102768ccca125a2982913de399611b56981a07278de74 --hash=sha256:b6e30929e3443f46aa7be2749fb003fefbbad6b6a1e2168bf8850a55b657914a --hash=sha256:b6ecbc1ff292c6799067d8064a4dd35cd25ba9d1a24aa41dd635d701691a49b5 --hash=sha256:b7dd0287b6cdd35a27d5678a56b1bc508ff206c2b78b30b4821dd5c3197b393a --hash=sha256:b96e9ee49ccbdb5676359f852a4497f7a9c5df6c377d8877f5330d6fd3ff42e4 --hash=sha256:bea7de36bb304a850710c1dfbb35e7cdb9a005928106a3adfc6dc3a753469dec --hash=sha256:bf6fa5a4d73b3a9699a57b8824d4863acde7241808a5305882222843537f02a2 --hash=sha256:c48960d420e90cf305cb1fde0d4e6082cc90512cda87a9acf0b6e04e91cf4abe --hash=sha256:cc6eb7502facce90349b4097a26821af224aaa0ab36e78304711cdb544352882 --hash=sha256:d0c7c0dfabdcb7cde080b7c9ef301c7533e90110198b39965141a903c7dddcf8 --hash=sha256:d64daa409e9b1ac818b0c59e47b005f802e130c8281e40c6a2f7e70c43f75e0f --hash=sha256:d7d9be35d50366fe5ac28188364154c9e1e22ad1b977a06c9465c0680c8eeefe --hash=sha256:dec156cda7322bcb1479ca992794705fe226a911b0ffebe13bff97fa1f3be63c --hash=sha256:e0608d1585557b68dcb6a70a41654f7536567960afad79d91752d2863b242b68 --hash=sha256:e0b87886bb45621d9279dad4ab9f2d154b5db0b019d378c107b8f71527b06a4a --hash=sha256:e0cf407a83118faf0463ade48a4533982f1737c7c58aac29e08855f7d9ad2977 --hash=sha256:e10e81d1db6c8fa507f61bebfd1ea383971dbc40c2005ed4db88fac5538b1ef6 --hash=sha256:e99bf8a3d54693f2063fa6c7d13955d460a9f543d9dbc80e69a92da288259b28 --hash=sha256:ef2a874cc70e2132c1c499268bdc34e211a715e481bc33c97b8a0190f2559295 --hash=sha256:f5e8603f0892d1b848e12124863b5b29af72383ee9b25ddc6fe4967d4c1ee6ef --hash=sha256:f6622e32cb46c60bee3b2c7dd7f5c22bdc86fcb8630336b4822ec81c3986111a --hash=sha256:f82a7567c590ff266f8c18fd527a0662edde074de11be256541a656e274f2b05 --hash=sha256:fd47c92e0d1e53f9498b1a30305072434fbae6b5a305cbcab514f959e9ce0fab --hash=sha256:ff5c1ab54a637c0adcdbb69ad10e5c4f1c4dedba69c0d1de383249b70c36908f
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/numba /opt/numba

FROM wheels_pip AS wheels_others
COPY <<"END" /tmp/lock.txt
numba==0.68.1 --hash=sha256:0b8c2cdf8d52373814d9fe0fdd91a654b4607527657488487c58ac897c2596a3 --hash=sha256:10967c80d943d32fec1a28bad89b404c820778c5d472844661900399879cbe95 --hash=sha256:26064885ae0ffcd365e1801beacc524ac4a9bd306b7552749dcca42e0ef2fed3 --hash=sha256:44f56e7c1e77d3380986f42e187ff13516aeac1f1771fe3826e65f003053d308 --hash=sha256:4d1b544f37fc237d16698a4266bb3d5b3c40ec8aa4c925a191ff09ec6d115310 --hash=sha256:58fe7a3810261cf13797d8aa94c018cfe91e1e8adf634df60eb60ef834f9367b --hash=sha256:5d4bd6ff1923d0b32a2208eaf3e1940f4548a13fdba8bd1ee7893b8f4b8f55f8 --hash=sha256:674d9c19e591e4e706c85ed9c7129dfea02086096250cb957dbffb64ebf3dba4 --hash=sha256:6d115039768cc2eb3cc99b32355ca507e1bbc653eca5492c83ab6399f218df27 --hash=sha256:7abaf69f64cbbeecf0c2384d55d1249ede6206de06d905da48f943c065e51490 --hash=sha256:7de5e5d00e6c8967fc861be2a015eb8ad701ab3cf65d7f4a2c4d950990cf65d3 --hash=sha256:8b33fee239194b9b6cb9b176f3c2563b94e5882fd846748ad0cf960daeee5406 --hash=sha256:8b89ed029ec79d017af9101afd8f832b1f7eb1a366227a439437c17f38be6122 --hash=sha256:9550e3f84ddca05d3cad1f2f780beed004a9b6c62fa12e995fb5bcb871d0cd6c --hash=sha256:9de461812470173a14eeb7e0bbd27c897dffe835402a33861166842fc5f6ea57 --hash=sha256:a4bdbff6ac4ea52a647c758e78403489a1b01a7ee9c2977c92f931c10802c078 --hash=sha256:b206741270692578112600767ef5e4935b38484a9edbc8dd925389ac67d0e828 --hash=sha256:b4d210701b32d1d4ffe26d5fc4e96c6b47e2c5d6c4c1a0f76dc48c156ef295ea --hash=sha256:bd238734c5bd4a7db5dd2e935d60dd9d485a5fa15b37396a2dd690b8b1d51742 --hash=sha256:c6f43dbbdcaac98a75a539b7c79ba490bd7265f24f454ac203de37bc5710ee71 --hash=sha256:c8882360f6bf7c6ff59308dc0fe79508a613a6e92329d4064ddd3258462cef4d --hash=sha256:c9cc5e30f0ec71d1d6e706cd3f9f98218a0221ee8cf25bb2079bdc1a9c4ae65a --hash=sha256:d372139235fcf11e3d81d1f145584e38c75a839b4d02f1f999cda1b134965eba --hash=sha256:dc3f29d540be5fc60699dbac53fc04f246cbf503a4e2e8315f04b70fcd9f1ec7 --hash=sha256:dc54a2cb3ccd2ae30dbae56311bb397bbd1428d9cd8ccb82a70da3439360bb30 --hash=sha256:de5fbbd0bec5496dc0408bf1eeaad4ff64a2b1e3c66b4065e4c42523550ee3e1 --hash=sha256:e5a2d544d8a2da45f9cc5856ed794c31f133ada51ef7a734a9b7cd4596e1887f --hash=sha256:e8069ec8807764fdd355a578e3943132a0b8e053e5d61e7b3639ed371ceaa80c --hash=sha256:ed9e36c95b79b675ec2332951118c3b264921a5cc49e0e934be2663ddece1b69 --hash=sha256:f2170303a731542b5c16501a08b2b1cbb4596e5bb9ba6a661b65ed953e59b8a6 --hash=sha256:fb83f1043e53753503d303036065990ff48fe0ef901e897153f57b2aec12c38d --hash=sha256:fc764aa37deab88718de20151af0f53aa72d1c5cb3b54c6eb648473323f80a5c
pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/numba /opt/numba
RUN set -eu; \
    cp -a /opt/numba/. /wheels/opt/numba

FROM body AS wheels
COPY --link --from=wheels_others /wheels/ /
COPY --link --from=wheels-numpy /wheels/ /
COPY --link --from=wheels-llvmlite /wheels/ /

COPY --link prices.py /opt/prices.py
LABEL org.opencontainers.image.source="https://github.com/numba/numba.git" \
      org.opencontainers.image.revision="0.68.1" \
      org.opencontainers.image.licenses="BSD-2-Clause"
CMD ["python3", "/opt/prices.py"]

ENV NVIDIA_VISIBLE_DEVICES=void
