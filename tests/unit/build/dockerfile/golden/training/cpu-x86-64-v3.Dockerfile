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
    sh isa.sh x86-64-v3 > isa.hpp; \
    g++ -std=c++17 -Wall -Wextra -O3 -march=x86-64-v3 -mprefer-vector-width=512 -fopenmp-simd \
      -static-libstdc++ -static-libgcc -s -o train train.cpp model.cpp gpu.cpp

# What is installed besides the program. This one needs nothing: here is the place for yours.
FROM debian:trixie AS body

# The image. --link makes each COPY a layer that depends on nothing below it, so cells share the layers they
# have in common, whatever the others are.
FROM body
COPY --link --from=program /src/train /usr/local/bin/train
CMD ["train"]

ENV NVIDIA_VISIBLE_DEVICES=void
