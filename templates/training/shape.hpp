// The sizes of the model and of its data. kernel.cu is compiled with the same numbers, so the CPU and the
// GPU train the same thing.
#pragma once

constexpr int kInputs = 32;
constexpr int kHidden = 256;
constexpr int kOutputs = 8;
constexpr int kBatch = 256;
constexpr int kBatches = 16;
constexpr int kSamples = kBatch * kBatches;

constexpr float kLearningRate = 0.2F;
// The loss is the mean of the squared errors; this is the factor of its derivative over one batch.
constexpr float kLossScale = 2.0F / (kBatch * kOutputs);
