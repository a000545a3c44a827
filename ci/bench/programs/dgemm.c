// dgemm [LIBRARY]: prints the GFLOP/s at which two matrices are multiplied, by the loops below or by a library.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { N = 512, BLOCK = 64 };
static double a[N * N], b[N * N], c[N * N];

// cblas_dgemm with 64-bit integers, under the name that the wheel scipy-openblas64 gives it.
typedef void Dgemm(int order, int of_a, int of_b, int64_t m, int64_t n, int64_t k, double alpha, const double *,
                   int64_t, const double *, int64_t, double beta, double *, int64_t);
static Dgemm *library;

static void multiply(void) {
    if (library) {
        library(101, 111, 111, N, N, N, 1.0, a, N, b, N, 1.0, c, N);
        return;
    }
    for (int first = 0; first < N; first += BLOCK)
        for (int i = 0; i < N; i++)
            for (int k = first; k < first + BLOCK; k++)
                for (int j = 0; j < N; j++)
                    c[i * N + j] += a[i * N + k] * b[k * N + j];
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int count, char **words) {
    if (count > 1) {
        void *opened = dlopen(words[1], RTLD_NOW);
        library = opened ? (Dgemm *)dlsym(opened, "scipy_cblas_dgemm64_") : NULL;
        if (!library) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
    }
    for (int i = 0; i < N * N; i++)
        a[i] = b[i] = i % 7;
    multiply();
    double start = seconds(), taken;
    int rounds = 0;
    do {
        multiply();
        rounds++;
        taken = seconds() - start;
    } while (taken < 1);
    printf("%.3f\n", 2e-9 * N * N * N * rounds / taken);
    return c[1] == 0;
}
