#include "model.hpp"

#include <algorithm>
#include <cmath>

#include "shape.hpp"

namespace {

// splitmix64: the same numbers from the same seed on every machine and with every compiler.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    // Uniform in [-1, 1).
    float next() {
        state_ += 0x9e3779b97f4a7c15U;
        std::uint64_t bits = state_;
        bits = (bits ^ (bits >> 30U)) * 0xbf58476d1ce4e5b9U;
        bits = (bits ^ (bits >> 27U)) * 0x94d049bb133111ebU;
        bits ^= bits >> 31U;
        return static_cast<float>(bits >> 40U) / static_cast<float>(1U << 23U) - 1.0F;
    }

    std::vector<float> vector(std::size_t size, float scale = 1.0F) {
        std::vector<float> values(size);
        for (float& value : values) {
            value = scale * next();
        }
        return values;
    }

private:
    std::uint64_t state_;
};

// A few samples go through the model together, so that a row of weights is read once for all of them.
constexpr int kGroup = 8;
static_assert(kBatch % kGroup == 0, "a batch is made of whole groups");

// The innermost loops run over the hidden units, which are independent of each other: that needs no
// -ffast-math to become vector code.
struct Group {
    float hidden[kGroup][kHidden];
    float difference[kGroup][kOutputs];
};

void forward(const Weights& weights, const float* inputs, const float* targets, Group& out) {
    for (auto& hidden : out.hidden) {
        std::copy_n(weights.first_bias.data(), kHidden, hidden);
    }
    for (int i = 0; i < kInputs; ++i) {
        const float* row = &weights.first[i * kHidden];
#pragma omp simd
        for (int j = 0; j < kHidden; ++j) {
            for (int s = 0; s < kGroup; ++s) {
                out.hidden[s][j] += inputs[s * kInputs + i] * row[j];
            }
        }
    }
    for (int s = 0; s < kGroup; ++s) {
        float* hidden = out.hidden[s];
#pragma omp simd
        for (int j = 0; j < kHidden; ++j) {
            hidden[j] = hidden[j] > 0 ? hidden[j] : 0;
        }
        for (int o = 0; o < kOutputs; ++o) {
            const float* row = &weights.second[o * kHidden];
            float sum = 0;
            // A sum is vectorised only where the code says that its order is free.
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < kHidden; ++j) {
                sum += hidden[j] * row[j];
            }
            out.difference[s][o] = sum + weights.second_bias[o] - targets[s * kOutputs + o];
        }
    }
}

// Adds one group's part to the gradient.
void backward(const Weights& weights, const float* inputs, const Group& group, Weights& gradient) {
    float hidden_delta[kGroup][kHidden] = {};
    for (int s = 0; s < kGroup; ++s) {
        const float* hidden = group.hidden[s];
        float* delta = hidden_delta[s];
        for (int o = 0; o < kOutputs; ++o) {
            const float output_delta = kLossScale * group.difference[s][o];
            const float* row = &weights.second[o * kHidden];
            float* row_gradient = &gradient.second[o * kHidden];
            gradient.second_bias[o] += output_delta;
#pragma omp simd
            for (int j = 0; j < kHidden; ++j) {
                delta[j] += output_delta * row[j];
                row_gradient[j] += output_delta * hidden[j];
            }
        }
        float* bias_gradient = gradient.first_bias.data();
#pragma omp simd
        for (int j = 0; j < kHidden; ++j) {
            delta[j] = hidden[j] > 0 ? delta[j] : 0;
            bias_gradient[j] += delta[j];
        }
    }
    for (int i = 0; i < kInputs; ++i) {
        float* row_gradient = &gradient.first[i * kHidden];
#pragma omp simd
        for (int j = 0; j < kHidden; ++j) {
            float sum = row_gradient[j];
            for (int s = 0; s < kGroup; ++s) {
                sum += inputs[s * kInputs + i] * hidden_delta[s][j];
            }
            row_gradient[j] = sum;
        }
    }
}

// Moves the values down their gradient, and clears the gradient for the next batch.
void descend(std::vector<float>& values, std::vector<float>& gradient) {
    float* value = values.data();
    float* slope = gradient.data();
    const std::size_t size = values.size();
#pragma omp simd
    for (std::size_t n = 0; n < size; ++n) {
        value[n] -= kLearningRate * slope[n];
        slope[n] = 0;
    }
}

class CpuModel : public Model {
public:
    CpuModel(const Data& data, const Weights& weights)
        : data_(data),
          weights_(weights),
          gradient_{std::vector<float>(weights.first.size()), std::vector<float>(weights.first_bias.size()),
                    std::vector<float>(weights.second.size()), std::vector<float>(weights.second_bias.size())} {}

    void train(int first, int last) override {
        for (int step = first; step < last; ++step) {
            const int begin = step % kBatches * kBatch;
            for (int sample = begin; sample < begin + kBatch; sample += kGroup) {
                Group group;
                forward(weights_, inputs(sample), targets(sample), group);
                backward(weights_, inputs(sample), group, gradient_);
            }
            descend(weights_.first, gradient_.first);
            descend(weights_.first_bias, gradient_.first_bias);
            descend(weights_.second, gradient_.second);
            descend(weights_.second_bias, gradient_.second_bias);
        }
    }

    double loss() override {
        double sum = 0;
        for (int sample = 0; sample < kSamples; sample += kGroup) {
            Group group;
            forward(weights_, inputs(sample), targets(sample), group);
            for (const auto& differences : group.difference) {
                for (const float difference : differences) {
                    sum += static_cast<double>(difference) * difference;
                }
            }
        }
        return sum / (kSamples * kOutputs);
    }

private:
    const float* inputs(int sample) const { return &data_.inputs[sample * kInputs]; }
    const float* targets(int sample) const { return &data_.targets[sample * kOutputs]; }

    const Data& data_;
    Weights weights_;
    Weights gradient_;
};

}  // namespace

Data make_data(std::uint64_t seed) {
    constexpr int kTeacher = 16;
    Random random(seed);
    const std::vector<float> first = random.vector(kTeacher * kInputs);
    const std::vector<float> second = random.vector(kOutputs * kTeacher);
    Data data{random.vector(kSamples * kInputs), std::vector<float>(kSamples * kOutputs)};
    for (int sample = 0; sample < kSamples; ++sample) {
        float hidden[kTeacher] = {};
        for (int k = 0; k < kTeacher; ++k) {
            for (int i = 0; i < kInputs; ++i) {
                hidden[k] += first[k * kInputs + i] * data.inputs[sample * kInputs + i];
            }
        }
        for (int o = 0; o < kOutputs; ++o) {
            float sum = 0;
            for (int k = 0; k < kTeacher; ++k) {
                sum += second[o * kTeacher + k] * std::max(hidden[k], 0.0F);
            }
            data.targets[sample * kOutputs + o] = sum;
        }
    }
    return data;
}

Weights make_weights(std::uint64_t seed) {
    // Another stream than the data's, so that the model does not start as its own teacher.
    Random random(~seed);
    const float first_scale = std::sqrt(6.0F / kInputs);
    const float second_scale = std::sqrt(3.0F / kHidden);
    return {random.vector(kInputs * kHidden, first_scale), std::vector<float>(kHidden),
            random.vector(kOutputs * kHidden, second_scale), std::vector<float>(kOutputs)};
}

std::unique_ptr<Model> make_cpu_model(const Data& data, const Weights& weights) {
    return std::make_unique<CpuModel>(data, weights);
}
