# imagematrix asks this stage's `cc` which CPU flags the code will need.
FROM debian:trixie AS compiler
RUN set -eu; \
    apt-get update -q; \
    apt-get install -qy --no-install-recommends gcc-14 g++-14 libc6-dev; \
    for name in cc gcc; do ln -s /usr/bin/gcc-14 "/usr/local/bin/$name"; done; \
    for name in c++ g++; do ln -s /usr/bin/g++-14 "/usr/local/bin/$name"; done

FROM compiler AS program
WORKDIR /src
COPY hello.c .
RUN cc -O2 -march=x86-64-v3 -DMARCH='"x86-64-v3"' -o hello hello.c

FROM debian:trixie
COPY --link --from=program /src/hello /usr/local/bin/hello
CMD ["hello"]

ENV NVIDIA_VISIBLE_DEVICES=void
