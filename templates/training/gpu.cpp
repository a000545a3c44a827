#include "gpu.hpp"

#include <dlfcn.h>
#include <link.h>

#include <climits>
#include <cstdlib>
#include <vector>

#include "shape.hpp"

// The part of cuda.h that is used here. Functions that once changed their binary interface have a number in
// their symbol's name, which cuda.h hides behind a macro.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

struct CudaApi {
    CUresult (*init)(unsigned flags);
    CUresult (*driver_get_version)(int* version);
    CUresult (*get_error_name)(CUresult error, const char** name);
    CUresult (*device_get)(CUdevice* device, int ordinal);
    CUresult (*device_get_name)(char* name, int size, CUdevice device);
    CUresult (*device_get_attribute)(int* value, int attribute, CUdevice device);
    CUresult (*ctx_create)(CUcontext* context, unsigned flags, CUdevice device);
    CUresult (*ctx_destroy)(CUcontext context);
    CUresult (*ctx_synchronize)();
    CUresult (*module_load_data)(CUmodule* module, const void* image);
    CUresult (*module_get_function)(CUfunction* function, CUmodule module, const char* name);
    CUresult (*mem_alloc)(CUdeviceptr* pointer, std::size_t bytes);
    CUresult (*memcpy_to_device)(CUdeviceptr to, const void* from, std::size_t bytes);
    CUresult (*memcpy_to_host)(void* to, CUdeviceptr from, std::size_t bytes);
    CUresult (*launch_kernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                              CUstream stream, void** arguments, void** extra);

    std::string name_of(CUresult code) const {
        const char* name = nullptr;
        return get_error_name(code, &name) == 0 && name != nullptr ? name : "unknown";
    }

    void check(CUresult code, const std::string& call) const {
        if (code != 0) {
            throw CudaError(call + " answered " + std::to_string(code) + " " + name_of(code));
        }
    }
};

namespace {

constexpr int kComputeMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR

template <typename Function>
void resolve(void* library, const char* symbol, Function& function) {
    void* address = dlsym(library, symbol);
    if (address == nullptr) {
        throw CudaError(std::string("libcuda.so.1 has no ") + symbol);
    }
    function = reinterpret_cast<Function>(address);
}

std::unique_ptr<CudaApi> resolve_all(void* library) {
    auto api = std::make_unique<CudaApi>();
    resolve(library, "cuInit", api->init);
    resolve(library, "cuDriverGetVersion", api->driver_get_version);
    resolve(library, "cuGetErrorName", api->get_error_name);
    resolve(library, "cuDeviceGet", api->device_get);
    resolve(library, "cuDeviceGetName", api->device_get_name);
    resolve(library, "cuDeviceGetAttribute", api->device_get_attribute);
    resolve(library, "cuCtxCreate_v2", api->ctx_create);
    resolve(library, "cuCtxDestroy_v2", api->ctx_destroy);
    resolve(library, "cuCtxSynchronize", api->ctx_synchronize);
    resolve(library, "cuModuleLoadData", api->module_load_data);
    resolve(library, "cuModuleGetFunction", api->module_get_function);
    resolve(library, "cuMemAlloc_v2", api->mem_alloc);
    resolve(library, "cuMemcpyHtoD_v2", api->memcpy_to_device);
    resolve(library, "cuMemcpyDtoH_v2", api->memcpy_to_host);
    resolve(library, "cuLaunchKernel", api->launch_kernel);
    return api;
}

// The driver's version is in no call of the driver API, only in the name of the file behind libcuda.so.1.
std::string version_of(void* library) {
    link_map* map = nullptr;
    char path[PATH_MAX];
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || realpath(map->l_name, path) == nullptr) {
        return "";
    }
    const std::string file = path;
    const std::string marker = "libcuda.so.";
    const std::size_t start = file.rfind(marker);
    const std::string version = start == std::string::npos ? "" : file.substr(start + marker.size());
    // A file that is itself named libcuda.so.1 does not tell.
    return version.find('.') == std::string::npos ? "" : version;
}

// The context ends with this object, and with it all that was allocated and loaded in it.
class Context {
public:
    Context(const CudaApi& api, CUdevice device) : api_(api) {
        api_.check(api_.ctx_create(&context_, 0, device), "cuCtxCreate");
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
    ~Context() { api_.ctx_destroy(context_); }

private:
    const CudaApi& api_;
    CUcontext context_ = nullptr;
};

class GpuModel : public Model {
public:
    GpuModel(const CudaApi& api, CUdevice device, const std::string& cubin, const Data& data,
             const Weights& weights)
        : api_(api), context_(api, device), squared_error_(kBatch * kOutputs) {
        CUmodule module = nullptr;
        api_.check(api_.module_load_data(&module, cubin.data()), "cuModuleLoadData");
        api_.check(api_.module_get_function(&samples_, module, "samples"), "cuModuleGetFunction");
        api_.check(api_.module_get_function(&update_, module, "update"), "cuModuleGetFunction");
        inputs_ = upload(data.inputs);
        targets_ = upload(data.targets);
        first_ = upload(weights.first);
        first_bias_ = upload(weights.first_bias);
        second_ = upload(weights.second);
        second_bias_ = upload(weights.second_bias);
        hidden_ = allocate(kBatch * kHidden);
        hidden_delta_ = allocate(kBatch * kHidden);
        output_delta_ = allocate(kBatch * kOutputs);
        device_squared_error_ = allocate(squared_error_.size());
    }

    void train(int first, int last) override {
        for (int step = first; step < last; ++step) {
            const int batch = step % kBatches;
            launch_samples(batch);
            launch_update(batch);
        }
        // A kernel's errors show in a later call: this is where the steps are known to be done.
        api_.check(api_.ctx_synchronize(), "cuCtxSynchronize");
    }

    double loss() override {
        double sum = 0;
        for (int batch = 0; batch < kBatches; ++batch) {
            launch_samples(batch);
            // This copy is in the kernels' stream and returns when it is done.
            api_.check(api_.memcpy_to_host(squared_error_.data(), device_squared_error_,
                                           squared_error_.size() * sizeof(float)),
                       "cuMemcpyDtoH");
            for (const float error : squared_error_) {
                sum += error;
            }
        }
        return sum / (kSamples * kOutputs);
    }

private:
    CUdeviceptr allocate(std::size_t floats) const {
        CUdeviceptr pointer = 0;
        api_.check(api_.mem_alloc(&pointer, floats * sizeof(float)), "cuMemAlloc");
        return pointer;
    }

    CUdeviceptr upload(const std::vector<float>& values) const {
        const CUdeviceptr pointer = allocate(values.size());
        api_.check(api_.memcpy_to_device(pointer, values.data(), values.size() * sizeof(float)), "cuMemcpyHtoD");
        return pointer;
    }

    // The arguments are all pointers, in the order in which the kernel declares them.
    void launch(CUfunction kernel, unsigned blocks, std::vector<CUdeviceptr> arguments) const {
        std::vector<void*> addresses;
        for (CUdeviceptr& argument : arguments) {
            addresses.push_back(&argument);
        }
        api_.check(api_.launch_kernel(kernel, blocks, 1, 1, kHidden, 1, 1, 0, nullptr, addresses.data(), nullptr),
                   "cuLaunchKernel");
    }

    void launch_samples(int batch) const {
        launch(samples_, kBatch,
               {row(inputs_, batch, kInputs), row(targets_, batch, kOutputs), first_, first_bias_, second_,
                second_bias_, hidden_, hidden_delta_, output_delta_, device_squared_error_});
    }

    void launch_update(int batch) const {
        launch(update_, kInputs + 1 + kOutputs,
               {row(inputs_, batch, kInputs), hidden_, hidden_delta_, output_delta_, first_, first_bias_, second_,
                second_bias_});
    }

    // Where the batch's first sample starts in an array of `width` numbers for each sample.
    static CUdeviceptr row(CUdeviceptr array, int batch, int width) {
        return array + static_cast<CUdeviceptr>(batch) * kBatch * width * sizeof(float);
    }

    const CudaApi& api_;
    Context context_;
    CUfunction samples_ = nullptr;
    CUfunction update_ = nullptr;
    CUdeviceptr inputs_ = 0;
    CUdeviceptr targets_ = 0;
    CUdeviceptr first_ = 0;
    CUdeviceptr first_bias_ = 0;
    CUdeviceptr second_ = 0;
    CUdeviceptr second_bias_ = 0;
    CUdeviceptr hidden_ = 0;
    CUdeviceptr hidden_delta_ = 0;
    CUdeviceptr output_delta_ = 0;
    CUdeviceptr device_squared_error_ = 0;
    std::vector<float> squared_error_;
};

}  // namespace

Cuda::Cuda() = default;
// The library stays loaded to the end of the process: it may have threads of its own.
Cuda::~Cuda() = default;

std::unique_ptr<Cuda> Cuda::load(std::string& why) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        why = dlerror();
        return nullptr;
    }
    std::unique_ptr<Cuda> cuda(new Cuda);
    cuda->api_ = resolve_all(library);
    const CudaApi& api = *cuda->api_;
    cuda->version = version_of(library);
    api.check(api.driver_get_version(&cuda->supported), "cuDriverGetVersion");
    cuda->init = api.init(0);
    cuda->init_name = api.name_of(cuda->init);
    if (cuda->init == 0) {
        CUdevice device = 0;
        char name[256] = "";
        int major = 0;
        int minor = 0;
        api.check(api.device_get(&device, 0), "cuDeviceGet");
        api.check(api.device_get_name(name, sizeof name, device), "cuDeviceGetName");
        api.check(api.device_get_attribute(&major, kComputeMajor, device), "cuDeviceGetAttribute");
        api.check(api.device_get_attribute(&minor, kComputeMinor, device), "cuDeviceGetAttribute");
        cuda->device = name;
        cuda->compute = std::to_string(major) + "." + std::to_string(minor);
    }
    return cuda;
}

std::unique_ptr<Model> make_gpu_model(const Cuda& cuda, const std::string& cubin, const Data& data,
                                      const Weights& weights) {
    CUdevice device = 0;
    cuda.api().check(cuda.api().device_get(&device, 0), "cuDeviceGet");
    return std::make_unique<GpuModel>(cuda.api(), device, cubin, data, weights);
}
