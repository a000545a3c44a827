/* Prints the CPUID leaves that flags come from, one line each: leaf subleaf eax ebx ecx edx, in hexadecimal. */
#include <cpuid.h>
#include <stdio.h>

int main(void) {
    static const unsigned leaves[][2] = {{1, 0}, {7, 0}, {7, 1}, {0xd, 1}, {0x80000001, 0}, {0x80000008, 0}};
    for (unsigned i = 0; i < sizeof leaves / sizeof *leaves; i++) {
        unsigned a = 0, b = 0, c = 0, d = 0;
        __get_cpuid_count(leaves[i][0], leaves[i][1], &a, &b, &c, &d);
        printf("%x %x %x %x %x %x\n", leaves[i][0], leaves[i][1], a, b, c, d);
    }
    return 0;
}
