// One training step on the GPU, in two launches: `samples` does a batch's forward and backward pass, one
// block per sample; then `update` sums the gradients over the batch and moves the weights. Nothing is added
// up with atomics, so the same seed gives the same weights every time.
#include "shape.hpp"

constexpr int kWarp = 32;
constexpr int kWarps = kHidden / kWarp;
static_assert(kHidden % kWarp == 0 && kHidden <= 1024, "a block has one thread for each hidden unit");

// Grid: kBatch blocks of kHidden threads. `inputs` and `targets` point to the batch's first sample. Writes
// for each sample what `update` needs, and its squared errors.
extern "C" __global__ void __launch_bounds__(kHidden)
samples(const float* inputs, const float* targets, const float* first, const float* first_bias,
        const float* second, const float* second_bias, float* hidden, float* hidden_delta,
        float* output_delta, float* squared_error) {
    __shared__ float row[kInputs];
    __shared__ float unit[kHidden];
    __shared__ float delta[kOutputs];
    const int sample = static_cast<int>(blockIdx.x);
    const int j = static_cast<int>(threadIdx.x);

    for (int i = j; i < kInputs; i += kHidden) {
        row[i] = inputs[sample * kInputs + i];
    }
    __syncthreads();

    float sum = first_bias[j];
    for (int i = 0; i < kInputs; ++i) {
        sum += row[i] * first[i * kHidden + j];
    }
    const float value = sum > 0.0F ? sum : 0.0F;
    unit[j] = value;
    hidden[sample * kHidden + j] = value;
    __syncthreads();

    // One warp for each output. The loop's bounds are the same in all lanes of a warp, so all of them take
    // part in every shuffle.
    const int lane = j % kWarp;
    for (int o = j / kWarp; o < kOutputs; o += kWarps) {
        float part = 0.0F;
        for (int k = lane; k < kHidden; k += kWarp) {
            part += unit[k] * second[o * kHidden + k];
        }
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
            part += __shfl_down_sync(0xffffffffU, part, distance);
        }
        if (lane == 0) {
            const float difference = part + second_bias[o] - targets[sample * kOutputs + o];
            delta[o] = kLossScale * difference;
            output_delta[sample * kOutputs + o] = delta[o];
            squared_error[sample * kOutputs + o] = difference * difference;
        }
    }
    __syncthreads();

    float back = 0.0F;
    for (int o = 0; o < kOutputs; ++o) {
        back += delta[o] * second[o * kHidden + j];
    }
    hidden_delta[sample * kHidden + j] = value > 0.0F ? back : 0.0F;
}

// Grid: one block of kHidden threads for each row of weights, that is kInputs + 1 + kOutputs blocks: the
// inputs' rows, the hidden units' bias, the outputs' rows (each with its bias).
extern "C" __global__ void __launch_bounds__(kHidden)
update(const float* inputs, const float* hidden, const float* hidden_delta, const float* output_delta,
       float* first, float* first_bias, float* second, float* second_bias) {
    const int row = static_cast<int>(blockIdx.x);
    const int j = static_cast<int>(threadIdx.x);
    float slope = 0.0F;
    if (row < kInputs) {
        for (int sample = 0; sample < kBatch; ++sample) {
            slope += inputs[sample * kInputs + row] * hidden_delta[sample * kHidden + j];
        }
        first[row * kHidden + j] -= kLearningRate * slope;
    } else if (row == kInputs) {
        for (int sample = 0; sample < kBatch; ++sample) {
            slope += hidden_delta[sample * kHidden + j];
        }
        first_bias[j] -= kLearningRate * slope;
    } else if (row - kInputs - 1 < kOutputs) {
        const int o = row - kInputs - 1;
        float bias_slope = 0.0F;
        for (int sample = 0; sample < kBatch; ++sample) {
            const float delta = output_delta[sample * kOutputs + o];
            slope += delta * hidden[sample * kHidden + j];
            bias_slope += delta;
        }
        second[o * kHidden + j] -= kLearningRate * slope;
        if (j == 0) {
            second_bias[o] -= kLearningRate * bias_slope;
        }
    }
}
