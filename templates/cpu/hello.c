/* Says what it was compiled for, and uses it: the compiler makes of the loop what -march allows. */
#include <stdio.h>

int main(void) {
    static float values[4096];
    float sum = 0;
    for (int i = 0; i < 4096; i++)
        values[i] = (float)i;
    for (int i = 0; i < 4096; i++)
        sum += values[i] * values[i];
    printf("hello from %s: %.6e\n", MARCH, sum);
    return 0;
}
