// The GPU by way of the CUDA driver API alone: libcuda is loaded while the program runs, so that one program
// serves images with and without it.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "model.hpp"

// What a call of the driver API answered, if that was not success.
class CudaError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

struct CudaApi;

// libcuda of this process.
class Cuda {
public:
    // Null where libcuda.so.1 cannot be loaded, and then `why` is the dynamic linker's word for it. Throws
    // CudaError where it is there but of no use.
    static std::unique_ptr<Cuda> load(std::string& why);
    ~Cuda();

    std::string version;    // of the library, from its file's name: "550.163.01"
    int supported = 0;      // the newest CUDA it knows: 12040 is 12.4
    int init = 0;           // what cuInit answered: 0 is success, 100 that there is no GPU
    std::string init_name;  // the same in CUDA's words: "CUDA_ERROR_NO_DEVICE"
    std::string device;     // the first GPU's name; empty if there is none
    std::string compute;    // and its compute capability: "8.9"

    static constexpr int kNoDevice = 100;

    const CudaApi& api() const { return *api_; }

private:
    Cuda();
    std::unique_ptr<CudaApi> api_;
};

// The model on the first GPU. `cubin` is the compiled kernel.cu.
std::unique_ptr<Model> make_gpu_model(const Cuda& cuda, const std::string& cubin, const Data& data,
                                      const Weights& weights);
