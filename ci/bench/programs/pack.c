// pack compress|decompress FILE: prints the MB/s of zstd, of what is not compressed, at its usual level.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "zstd.h"

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int count, char **words) {
    FILE *file = count == 3 ? fopen(words[2], "rb") : NULL;
    if (!file || fseek(file, 0, SEEK_END))
        return 1;
    size_t size = (size_t)ftell(file), most = ZSTD_compressBound(size);
    char *plain = malloc(size), *packed = malloc(most);
    rewind(file);
    if (!plain || !packed || fread(plain, 1, size, file) != size)
        return 1;
    size_t length = ZSTD_compress(packed, most, plain, size, ZSTD_CLEVEL_DEFAULT);
    double start = seconds(), taken;
    int rounds = 0;
    do {
        if (strcmp(words[1], "compress") == 0)
            ZSTD_compress(packed, most, plain, size, ZSTD_CLEVEL_DEFAULT);
        else if (ZSTD_decompress(plain, size, packed, length) != size)
            return 1;
        rounds++;
        taken = seconds() - start;
    } while (taken < 1);
    printf("%.3f\n", 1e-6 * (double)size * rounds / taken);
    return 0;
}
