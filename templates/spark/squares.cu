// Squares `count` numbers in place. Any grid of blocks in one dimension will do.
extern "C" __global__ void squares(float* numbers, int count) {
    const int step = static_cast<int>(gridDim.x * blockDim.x);
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count; i += step) {
        numbers[i] *= numbers[i];
    }
}
