# Stages come in the order of how many cells share them. What differs between cells (-march, the GPU's target,
# the driver) is named as late as possible: a cell that differs in one thing repeats one step.

# The compiler of the program. imagematrix asks the stage of this name which CPU flags its code will need.
FROM debian:trixie AS compiler
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends g++; \
    test "gcc-$(gcc -dumpversion)" = "gcc-14" || { \
      echo "the compiler here is gcc-$(gcc -dumpversion), not gcc-14" >&2; exit 1; }
WORKDIR /src

# The program, for one kind of CPU. Its C++ library is inside it, so that it runs on a bare Debian. By default GCC
# uses vectors of 256 bits for Intel's servers, which makes this program slower.
FROM compiler AS program
COPY isa.sh *.hpp train.cpp model.cpp gpu.cpp ./
RUN set -eu; \
    sh isa.sh znver4 > isa.hpp; \
    g++ -std=c++17 -Wall -Wextra -O3 -march=znver4 -mprefer-vector-width=512 -fopenmp-simd \
      -static-libstdc++ -static-libgcc -s -o train train.cpp model.cpp gpu.cpp

# What is installed besides the program. This one needs nothing: here is the place for yours.
FROM debian:trixie AS body

# The program's code for the GPU, made by the compiler of CUDA 12.4.
FROM compiler AS kernel-compiler
COPY compile_kernel.cpp ./
RUN g++ -std=c++17 -Wall -Wextra -O1 -static-libstdc++ -static-libgcc -s -o compile_kernel compile_kernel.cpp

FROM debian:trixie AS nvrtc
RUN set -eu; \
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do \
      if [ -e "$list" ]; then \
        sed -i -E '/^(deb |Components:)/s/ main.*$/ main contrib non-free/' "$list"; \
      fi; \
    done; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends libnvrtc12
WORKDIR /src

FROM nvrtc AS kernel
COPY --from=kernel-compiler /src/compile_kernel ./
COPY kernel.cu shape.hpp ./
RUN set -eu; \
    mkdir /kernel; \
    ./compile_kernel kernel.cu sm_90 12.4 /kernel

# The driver's part that runs in the program's process. It has to be of the same version as the node's kernel
# module, which is why there is one image for each.
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

# With it the dynamic linker finds the driver, without looking through the folders at every start.
FROM body AS linker-cache
COPY --from=driver /driver/ /
RUN ldconfig

# The image. --link makes each COPY a layer that depends on nothing below it, so cells share the layers they
# have in common, whatever the others are.
FROM body
COPY --link --from=program /src/train /usr/local/bin/train
COPY --link --from=kernel /kernel/ /usr/local/share/training/
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
CMD ["train"]
# Last, so that images for other drivers differ in this layer only.
COPY --link --from=driver /driver/ /

ENV NVIDIA_VISIBLE_DEVICES=void
