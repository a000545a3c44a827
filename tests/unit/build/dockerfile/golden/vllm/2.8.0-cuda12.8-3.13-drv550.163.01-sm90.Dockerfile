FROM pytorch:v1 AS body
ENV PATH=/opt/vllm/bin:$PATH PYTHONPATH=/opt/vllm

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

FROM wheels_pip AS wheels-cupy-cuda12x
COPY <<"END" /tmp/lock.txt
cupy-cuda12x==13.6.0 --hash=sha256:52d9e7f83d920da7d81ec2e791c2c2c747fdaa1d7b811971b34865ce6371e98a
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels-llguidance
COPY <<"END" /tmp/lock.txt
llguidance==0.7.30 --hash=sha256:9edc409b9decd6cffba5f5bf3b4fbd7541f95daa8cbc9510cbf96c6ab1ffc153
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels-llvmlite
COPY <<"END" /tmp/lock.txt
llvmlite==0.44.0 --hash=sha256:46224058b13c96af1365290bdfebe9a6264ae62fb79b2b55693deed11657a8bf
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels-opencv-python-headless
COPY <<"END" /tmp/lock.txt
opencv-python-headless==4.12.0.88 --hash=sha256:236c8df54a90f4d02076e6f9c1cc763d794542e886c576a6fee46ec8ff75a7a9
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels-ray
COPY <<"END" /tmp/lock.txt
ray==2.49.2 --hash=sha256:b7d8214cff86df044fec727eeeabccc3bfc9b0271d28d61ba92c09f0d127d01d
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels-scipy
COPY <<"END" /tmp/lock.txt
scipy==1.16.2 --hash=sha256:c2275ff105e508942f99d4e3bc56b6ef5e4b3c0af970386ca56b777608ce95b7
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels-transformers
COPY <<"END" /tmp/lock.txt
transformers==4.56.2 --hash=sha256:79c03d0e85b26cb573c109ff9eafa96f3c8d4febfd8a0774e8bba32702dd6dde
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels-vllm
COPY <<"END" /tmp/lock.txt
vllm==0.11.0 --hash=sha256:3861c75ff2b12e24f6d179ff5c084d791b42ded8675d76c8706697c79f68cd62
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels-xformers
COPY <<"END" /tmp/lock.txt
xformers==0.0.32.post1 --hash=sha256:5f245b5555188da112070d8fefb6b7ae1ae47422856521d66c837e9d2352fbe4
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM wheels_pip AS wheels_others
COPY <<"END" /tmp/lock.txt
aiohappyeyeballs==2.6.1 --hash=sha256:f349ba8f4b75cb25c99c5c2d84e997e485204d2902a9597802b0371f09331fb8
aiohttp==3.12.15 --hash=sha256:5346b93e62ab51ee2a9d68e8f73c7cf96ffb73568a23e683f931e52450e4148d
aiosignal==1.4.0 --hash=sha256:053243f8b92b990551949e63930a839ff0cf0b0ebbe0597b0f3fb19e1a0fe82e
annotated-types==0.7.0 --hash=sha256:1f02e8b43a8fbbc3f3e0d4f0f4bfc8131bcb4eebe8849b8e5c773f3a1c582a53
anyio==4.11.0 --hash=sha256:0287e96f4d26d4149305414d4e3bc32f0dcd0862365a4bddea19d7a1ec38c4fc
astor==0.8.1 --hash=sha256:070a54e890cefb5b3739d19f30f5a5ec840ffc9c50ffa7d23cc9fc1a38ebbfc5
attrs==25.3.0 --hash=sha256:427318ce031701fea540783410126f03899a97ffc6f61596ad581ac2e40e3bc3
blake3==1.0.7 --hash=sha256:c4502df76daac3d1a0fc695c207e9686c38c412d7e1c5aad45a86517c2a57d6f
cachetools==6.2.0 --hash=sha256:1c76a8960c0041fcc21097e357f882197c79da0dbff766e7317890a65d7d8ba6
cbor2==5.7.0 --hash=sha256:a91b6912e2ff64f33464f67ec6528cf2e26c06a5f3cc3fb1954f94aa58d68670
certifi==2025.10.5 --hash=sha256:0f212c2744a9bb6de0c56639a6f68afe01ecd92d91f14ae897c4fe7bbeeef0de
cffi==2.0.0 --hash=sha256:c8d3b5532fc71b7a77c09192b4a5a200ea992702734a2e9279a37f2478236f26
charset-normalizer==3.4.3 --hash=sha256:416175faf02e4b0810f1f38bcb54682878a4af94059a1cd63b8747244420801f
click==8.3.0 --hash=sha256:9b9f285302c6e3064f4330c05f05b81945b2a39544279343e6e7c5f27a9baddc
cloudpickle==3.1.1 --hash=sha256:c8c5a44295039331ee9dad40ba100a9c7297b6f988e50e87ccdf3765a668350e
compressed-tensors==0.11.0 --hash=sha256:e1cbc46e1ae032b7ceea915fe18c8d2de5a54d3a50a607969b6bdfe703b6cb83
depyf==0.19.0 --hash=sha256:040b35fc0997d49df024b7d094f2a7836f91e9ed02f49982dd37e70aa3285ad5
dill==0.4.0 --hash=sha256:44f54bf6412c2c8464c14e8243eb163690a9800dbe2c367330883b19c7561049
diskcache==5.6.3 --hash=sha256:5e31b2d5fbad117cc363ebaf6b689474db18a1f6438bc82358b024abd4c2ca19
distro==1.9.0 --hash=sha256:7bffd925d65168f85027d8da9af6bddab658135b840670a223589bc0c8ef02b2
dnspython==2.8.0 --hash=sha256:01d9bbc4a2d76bf0db7c1f729812ded6d912bd318d3b1cf81d30c0f845dbf3af
einops==0.8.1 --hash=sha256:919387eb55330f5757c6bea9165c5ff5cfe63a642682ea788a6d472576d81737
email-validator==2.3.0 --hash=sha256:80f13f623413e6b197ae73bb10bf4eb0908faf509ad8362c5edeb0be7fd450b4
fastapi==0.118.0 --hash=sha256:705137a61e2ef71019d2445b123aa8845bd97273c395b744d5a7dfe559056855
fastapi-cli==0.0.13 --hash=sha256:219b73ccfde7622559cef1d43197da928516acb4f21f2ec69128c4b90057baba
fastapi-cloud-cli==0.3.0 --hash=sha256:572677dbe38b6d4712d30097a8807b383d648ca09eb58e4a07cef4a517020832
fastrlock==0.8.3 --hash=sha256:dbdea6deeccea1917c6017d353987231c4e46c93d5338ca3e66d6cd88fbce259
frozendict==2.4.6 --hash=sha256:7134a2bb95d4a16556bb5f2b9736dceb6ea848fa5b6f3f6c2d6dba93b44b4757
frozenlist==1.7.0 --hash=sha256:8bd7eb96a675f18aa5c553eb7ddc24a43c8c18f22e1f9925528128c052cdbe00
gguf==0.17.1 --hash=sha256:7bc5aa7eeb1931f7d39b48fdc5b38fda6b294b9dca75cf607ac69557840a3943
h11==0.16.0 --hash=sha256:63cf8bbe7522de3bf65932fda1d9c2772064ffb3dae62d55932da54b31cb6c86
hf-xet==1.1.10 --hash=sha256:6b6bceb6361c80c1cc42b5a7b4e3efd90e64630bcf11224dcac50ef30a47e435
httpcore==1.0.9 --hash=sha256:2d400746a40668fc9dec9810239072b40b4484b640a8c38fd654a024c7a1bf55
httptools==0.6.4 --hash=sha256:4d87b29bd4486c0093fc64dea80231f7c7f7eb4dc70ae394d70a495ab8436071
httpx==0.28.1 --hash=sha256:d909fcccc110f8c7faf814ca82a9a4d816bc5a6dbfea25d6591d6985b8ba59ad
huggingface-hub==0.35.3 --hash=sha256:0e3a01829c19d86d03793e4577816fe3bdfc1602ac62c7fb220d593d351224ba
idna==3.10 --hash=sha256:946d195a0d259cbba61165e88e65941f16e9b36ea6ddb97f00452bae8b1287d3
interegular==0.3.3 --hash=sha256:b0c07007d48c89d6d19f7204972d369b2a77222722e126b6aa63aa721dc3b19c
jiter==0.11.0 --hash=sha256:bb948402821bc76d1f6ef0f9e19b816f9b09f8577844ba7140f0b6afe994bc64
jsonschema==4.25.1 --hash=sha256:3fba0169e345c7175110351d456342c364814cfcf3b964ba4587f22915230a63
jsonschema-specifications==2025.9.1 --hash=sha256:98802fee3a11ee76ecaca44429fda8a41bff98b00a0f2838151b113f210cc6fe
lark==1.2.2 --hash=sha256:c2276486b02f0f1b90be155f2c8ba4a8e194d42775786db622faccd652d8e80c
lm-format-enforcer==0.11.3 --hash=sha256:cf586350875def1ae7a8fba84fcbbfc8371424b6c9d05c1fcba70aa233fbf06f
markdown-it-py==4.0.0 --hash=sha256:87327c59b172c5011896038353a81343b6754500a08cd7a4973bb48c6d578147
mdurl==0.1.2 --hash=sha256:84008a41e51615a49fc9966191ff91509e3c40b939176e643fd50a5c2196b8f8
mistral-common==1.8.5 --hash=sha256:f3cf87b61958a00485e603f3fe0530eb509d7e9b2f7178329dcd260e307eced1
msgpack==1.1.1 --hash=sha256:9d592d06e3cc2f537ceeeb23d38799c6ad83255289bb84c2e5792e5a8dea268a
msgspec==0.19.0 --hash=sha256:60ef4bdb0ec8e4ad62e5a1f95230c08efb1f64f32e6e8dd2ced685bcc73858b5
multidict==6.6.4 --hash=sha256:497a2954adc25c08daff36f795077f63ad33e13f19bfff7736e72c785391534f
ninja==1.13.0 --hash=sha256:fb46acf6b93b8dd0322adc3a4945452a4e774b75b91293bafcc7b7f8e6517dfa
numba==0.61.2 --hash=sha256:bdbca73ad81fa196bd53dc12e3aaf1564ae036e0c125f237c7644fe64a4928ab
openai==2.1.0 --hash=sha256:33172e8c06a4576144ba4137a493807a9ca427421dcabc54ad3aa656daf757d3
openai-harmony==0.0.4 --hash=sha256:31e9bcac0902a309e2fc688e52f247eec7fffcd00d17e958b9a83a8fea6519c2
outlines-core==0.2.11 --hash=sha256:daef6eaaf8c3403455ab5cbf265cb5c6838df571eb7c4b23cddac19cfc701726
packaging==25.0 --hash=sha256:29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484
partial-json-parser==0.2.1.1.post6 --hash=sha256:abc332f09b13ef5233384dbfe7128a0e9ea3fa4b8f8be9b37ac1b433c810e99e
pillow==11.3.0 --hash=sha256:13f87d581e71d9189ab21fe0efb5a23e9f28552d5be6979e84001d3b8505abe8
prometheus-client==0.23.1 --hash=sha256:dd1913e6e76b59cfe44e7a4b83e01afc9873c1bdfd2ed8739f1e76aeca115f99
prometheus-fastapi-instrumentator==7.1.0 --hash=sha256:978130f3c0bb7b8ebcc90d35516a6fe13e02d2eb358c8f83887cdef7020c31e9
propcache==0.3.2 --hash=sha256:4c1396592321ac83157ac03a2023aa6cc4a3cc3cfdecb71090054c09e5a7cce3
protobuf==6.32.1 --hash=sha256:b1864818300c297265c83a4982fd3169f97122c299f56a56e2445c3698d34710
psutil==7.1.0 --hash=sha256:8c70e113920d51e89f212dd7be06219a9b88014e63a4cec69b684c327bc474e3
py-cpuinfo==9.0.0 --hash=sha256:859625bc251f64e21f077d099d4162689c762b5d6a4c3c97553d56241c9674d5
pybase64==1.4.2 --hash=sha256:d377d48acf53abf4b926c2a7a24a19deb092f366a04ffd856bf4b3aa330b025d
pycountry==24.6.1 --hash=sha256:f1a4fb391cd7214f8eefd39556d740adcc233c778a27f8942c8dca351d6ce06f
pycparser==2.23 --hash=sha256:e5c6e8d3fbad53479cab09ac03729e0a9faf2bee3db8208a550daf5af81a5934
pydantic==2.11.10 --hash=sha256:802a655709d49bd004c31e865ef37da30b540786a46bfce02333e0e24b5fe29a
pydantic-core==2.33.2 --hash=sha256:9fdac5d6ffa1b5a83bca06ffe7583f5576555e6c8b3a91fbd25ea7780f825f7d
pydantic-extra-types==2.10.5 --hash=sha256:b60c4e23d573a69a4f1a16dd92888ecc0ef34fb0e655b4f305530377fa70e7a8
pygments==2.19.2 --hash=sha256:86540386c03d588bb81d44bc3928634ff26449851e99741617ecb9037ee5ec0b
python-dotenv==1.1.1 --hash=sha256:31f23644fe2602f88ff55e1f5c79ba497e01224ee7737937930c448e4d0e24dc
python-json-logger==3.3.0 --hash=sha256:dd980fae8cffb24c13caf6e158d3d61c0d6d22342f932cb6e9deedab3d35eec7
python-multipart==0.0.20 --hash=sha256:8a62d3a8335e06589fe01f2a3e178cdcc632f3fbe0d492ad9ee0ec35aab1f104
pyyaml==6.0.3 --hash=sha256:0f29edc409a6392443abf94b9cf89ce99889a1dd5376d94316ae5145dfedd5d6
pyzmq==27.1.0 --hash=sha256:43ad9a73e3da1fab5b0e7e13402f0b2fb934ae1c876c51d0afff0e7c052eca31
referencing==0.36.2 --hash=sha256:e8699adbbf8b5c7de96d8ffa0eb5c158b3beafce084968e2ea8bb08c6794dcd0
regex==2025.9.18 --hash=sha256:92a8e375ccdc1256401c90e9dc02b8642894443d549ff5e25e36d7cf8a80c783
requests==2.32.5 --hash=sha256:2462f94637a34fd532264295e186976db0f5d453d1cdd31473c85a6a161affb6
rich==14.1.0 --hash=sha256:536f5f1785986d6dbdea3c75205c473f970777b4a0d6c6dd1b696aa05a3fa04f
rich-toolkit==0.15.1 --hash=sha256:36a0b1d9a135d26776e4b78f1d5c2655da6e0ef432380b5c6b523c8d8ab97478
rignore==0.7.0 --hash=sha256:e0428b64d8b02ad83fc0a2505ded0e9064cac97df7aa1dffc9c7558b56429912
rpds-py==0.27.1 --hash=sha256:2efe4eb1d01b7f5f1939f4ef30ecea6c6b3521eec451fb93191bf84b2a522418
safetensors==0.6.2 --hash=sha256:8045db2c872db8f4cbe3faa0495932d89c38c899c603f21e9b6486951a5ecb8f
sentencepiece==0.2.1 --hash=sha256:c7f0fd2f2693309e6628aeeb2e2faf6edd221134dfccac3308ca0de01f8dab47
sentry-sdk==2.39.0 --hash=sha256:ba655ca5e57b41569b18e2a5552cb3375209760a5d332cdd87c6c3f28f729602
setproctitle==1.3.7 --hash=sha256:0564a936ea687cd24dffcea35903e2a20962aa6ac20e61dd3a207652401492dd
setuptools==79.0.1 --hash=sha256:e147c0549f27767ba362f9da434eab9c5dc0045d5304feb602a0af001089fc51
shellingham==1.5.4 --hash=sha256:7ecfff8f2fd72616f7481040475a65b2bf8af90a56c89140852d1120324e8686
six==1.17.0 --hash=sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274
sniffio==1.3.1 --hash=sha256:2f6da418d1f1e0fddd844478f41680e794e6051915791a034ff65e5f100525a2
soundfile==0.13.1 --hash=sha256:03267c4e493315294834a0870f31dbb3b28a95561b80b134f0bd3cf2d5f0e618
soxr==1.0.0 --hash=sha256:e8f2a69686f2856d37823bbb7b78c3d44904f311fe70ba49b893af11d6b6047b
starlette==0.48.0 --hash=sha256:0764ca97b097582558ecb498132ed0c7d942f233f365b86ba37770e026510659
tiktoken==0.11.0 --hash=sha256:7fb4effe60574675118b73c6fbfd3b5868e5d7a1f570d6cc0d18724b09ecf318
tokenizers==0.22.1 --hash=sha256:e2ef6063d7a84994129732b47e7915e8710f27f99f3a3260b8a38fc7ccd083f4
torchaudio==2.8.0 --hash=sha256:d2a85b124494736241884372fe1c6dd8c15e9bc1931bd325838c5c00238c7378
torchvision==0.23.0 --hash=sha256:a76fafe113b2977be3a21bf78f115438c1f88631d7a87203acb3dd6ae55889e6
tqdm==4.67.1 --hash=sha256:26445eca388f82e72884e0d580d5464cd801a3ea01e63e5601bdff9ba6a48de2
typer==0.19.2 --hash=sha256:755e7e19670ffad8283db353267cb81ef252f595aa6834a0d1ca9312d9326cb9
typing-inspection==0.4.2 --hash=sha256:4ed1cacbdc298c220f1bd249ed5287caa16f34d44ef4e9c3d0cbad5b521545e7
urllib3==2.5.0 --hash=sha256:e6b01673c0fa6a13e374b50871808eb3bf7046c4b125b216f6bf1cc604cff0dc
uvicorn==0.37.0 --hash=sha256:913b2b88672343739927ce381ff9e2ad62541f9f8289664fa1d1d3803fa2ce6c
uvloop==0.21.0 --hash=sha256:f3df876acd7ec037a3d005b3ab85a7e4110422e4d9c1571d4fc89b0fc41b6816
watchfiles==1.1.0 --hash=sha256:d9481174d3ed982e269c090f780122fb59cee6c3796f74efe74e70f7780ed94c
websockets==15.0.1 --hash=sha256:0f3c1e2ab208db911594ae5b4f79addeb3501604a165019dd221c0bdcabe4db8
xgrammar==0.1.25 --hash=sha256:7a1a6a638167d704a22a0c9670e2176104c38e38c351286a07a77143e22f9053
yarl==1.21.0 --hash=sha256:1107b93c32cf7d7e2ece9bbb1b1820ecb923cfea24c8aa599a309434ed37d707
END

RUN --mount=type=secret,id=ca,target=/run/secrets/ca --mount=type=secret,id=pip-conf,target=/etc/pip.conf \
    install-wheels /opt/pytorch /opt/vllm numba/cuda/tests

RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/imagematrix-trim \
    python3 -I /tmp/imagematrix-trim/trim.pyz --compute 9.0 /wheels

FROM body AS wheels
COPY --link --from=wheels_others /wheels/ /
COPY --link --from=wheels-llguidance /wheels/ /
COPY --link --from=wheels-transformers /wheels/ /
COPY --link --from=wheels-scipy /wheels/ /
COPY --link --from=wheels-llvmlite /wheels/ /
COPY --link --from=wheels-opencv-python-headless /wheels/ /
COPY --link --from=wheels-ray /wheels/ /
COPY --link --from=wheels-xformers /wheels/ /
COPY --link --from=wheels-cupy-cuda12x /wheels/ /
COPY --link --from=wheels-vllm /wheels/ /

LABEL org.opencontainers.image.source="https://github.com/vllm-project/vllm.git" \
      org.opencontainers.image.revision="v0.11.0" \
      org.opencontainers.image.licenses="Apache-2.0"
CMD ["vllm", "serve"]

ENV NVIDIA_VISIBLE_DEVICES=void
