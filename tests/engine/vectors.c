/* Loops that compilers turn into whatever the CPU they compile for can do; its result is checked. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { N = 1024 };

static float a[N], b[N], c[N];
static double x[N], y[N];
static int32_t i32[N];
static uint8_t bytes[N], other[N];
static uint64_t words[N];

int main(int argc, char **argv) {
    (void)argv;
    for (int i = 0; i < N; i++) {
        a[i] = (float)(i % 17) * (float)argc;
        b[i] = (float)(i % 13);
        x[i] = i * 0.5;
        i32[i] = i * 37 % 101;
        bytes[i] = (uint8_t)(i * 7);
        words[i] = (uint64_t)i * 0x9e3779b97f4a7c15u;
    }
    double sum = 0;
    uint64_t bits = 0;
    for (int i = 0; i < N; i++) c[i] = a[i] * b[i] + c[(i + 1) % N];
    for (int i = 0; i < N; i++) y[i] = floor(x[i]) * 1.5 + sqrt(x[i]);
    for (int i = 0; i < N; i++) i32[i] = (i32[i] << 3) ^ (i32[i] > 50 ? i32[i] : -i32[i]);
    for (int i = 0; i < N; i++) other[i] = (uint8_t)((bytes[i] + other[i] + 1) / 2);
    for (int i = 0; i < N; i++) bits += (uint64_t)__builtin_popcountll(words[i]);
    for (int i = 0; i < N; i++) bits += words[i] ? (uint64_t)__builtin_clzll(words[i]) + (uint64_t)__builtin_ctzll(words[i]) : 0;
    for (int i = 0; i < N; i++) bits ^= (words[i] >> (i % 63)) & ~words[(i + 3) % N];
    for (int i = 0; i < N; i++) sum += (double)c[i] + y[i] + i32[i] + other[i];
    int32_t dot = 0;
    for (int i = 0; i < N; i++) dot += (int8_t)bytes[i] * (int8_t)other[i];
    bits += (uint64_t)__atomic_fetch_add(&dot, 1, __ATOMIC_SEQ_CST);
    uint32_t swapped = 0;
    for (int i = 0; i < N; i++) swapped += __builtin_bswap32((uint32_t)words[i]);
    printf("%.3f %llu %u\n", sum, (unsigned long long)bits, swapped);
    return 0;
}
