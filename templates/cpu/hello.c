/* Says what it was compiled for, and uses it: the compiler makes of the loops what -march allows. */
#include <stdio.h>

int main(void) {
    static float values[4096];
    float sum = 0;
    int bits = 0;
    for (int i = 0; i < 4096; i++)
        values[i] = (float)i;
    for (int i = 0; i < 4096; i++)
        sum += values[i] * values[i];
    for (int i = 0; i < 4096; i++)
        bits += __builtin_popcount(i); /* one instruction from x86-64-v2 on */
    printf("hello from %s: %.6e, %d\n", MARCH, sum, bits);
    return 0;
}
