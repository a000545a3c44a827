// A two-layer perceptron (inputs -> ReLU -> outputs) that learns to imitate a smaller, random one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

// Row-major: inputs[sample][input], targets[sample][output].
struct Data {
    std::vector<float> inputs;
    std::vector<float> targets;
};

// Row-major: first[input][hidden], second[output][hidden]. In both, the hidden units are side by side:
// that is the direction in which the loops are vectorised.
struct Weights {
    std::vector<float> first;
    std::vector<float> first_bias;
    std::vector<float> second;
    std::vector<float> second_bias;
};

Data make_data(std::uint64_t seed);
Weights make_weights(std::uint64_t seed);

// A model on some device. Step n trains on batch n modulo kBatches.
class Model {
public:
    Model() = default;
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;
    virtual ~Model() = default;

    // Does the steps `first`, `first` + 1, ... `last` - 1, and returns when they are done.
    virtual void train(int first, int last) = 0;
    // The loss over all samples.
    virtual double loss() = 0;
};

std::unique_ptr<Model> make_cpu_model(const Data& data, const Weights& weights);
