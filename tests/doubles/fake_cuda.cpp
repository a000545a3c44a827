// A libcuda.so.1 without a GPU: it runs kernel.cu on the CPU. A block's threads are fibers that switch at each
// __syncthreads and each shuffle, so a kernel that forgets to wait reads values before they are written. The
// memory after every allocation is protected, so a kernel that accesses it crashes.
//
// After its first thousand kernels it rests before each: jobs that compute until they are stopped leave the processor
// to the tests beside them.
//
// If CUDA_CACHE_PATH is set, it takes seconds to compile PTX, and keeps a file for it there.
//
// FAKE_CUDA=cuModuleLoadData=209 makes that function fail; FAKE_CUDA=idle makes kernels do nothing.
//
// -DDEVICE, -DMAJOR and -DMINOR simulate another GPU. With -DNODES it requires the device nodes that CUDA
// requires, and keeps them open as CUDA does.
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef DEVICE
#define DEVICE "Fake \"GPU\""
#define MAJOR 8
#define MINOR 9
#endif

constexpr int CUDA = 12040;
constexpr unsigned COMPILING_S = 10;
constexpr int PTX = 84;  // the PTX ISA version of that CUDA release, times ten

struct Index {
    unsigned x;
};
static Index blockIdx;
static Index threadIdx;

static void wait_for_block();
static float __shfl_down_sync(unsigned mask, float value, int distance);

#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
#define __syncthreads wait_for_block
#include "kernel.cu"

namespace {

struct Fiber {
    std::vector<char> stack = std::vector<char>(32768);
    ucontext_t start{};
    std::jmp_buf resume{};
    bool started = false;
    bool done = false;
    // Two values, used alternately: one stays until all threads have read it, without another wait.
    float shuffled[2] = {0, 0};
    unsigned shuffles = 0;
};

struct Arguments {
    void** at;
    template <typename T>
    operator T*() { return *static_cast<T**>(*at++); }
};

std::vector<Fiber> fibers(kHidden);
std::jmp_buf scheduler;
ucontext_t scheduler_context;
std::string kernel_name;
void** kernel_arguments;

void call_kernel() {
    Arguments a{kernel_arguments};
    // Braces, unlike parentheses, fix the order in which the arguments are evaluated.
    if (kernel_name == "samples") {
        struct {
            const float *inputs, *targets, *first, *first_bias, *second, *second_bias;
            float *hidden, *hidden_delta, *output_delta, *squared_error;
        } p{a, a, a, a, a, a, a, a, a, a};
        samples(p.inputs, p.targets, p.first, p.first_bias, p.second, p.second_bias, p.hidden, p.hidden_delta,
                p.output_delta, p.squared_error);
    } else {
        struct {
            const float *inputs, *hidden, *hidden_delta, *output_delta;
            float *first, *first_bias, *second, *second_bias;
        } p{a, a, a, a, a, a, a, a};
        update(p.inputs, p.hidden, p.hidden_delta, p.output_delta, p.first, p.first_bias, p.second, p.second_bias);
    }
}

// A fiber runs one block after the other, because creating a fiber takes much longer than switching to it.
[[noreturn]] void fiber_main() {
    for (;;) {
        call_kernel();
        fibers[threadIdx.x].done = true;
        wait_for_block();
    }
}

// Lets thread `n` run to its next wait.
void turn(unsigned n) {
    Fiber& fiber = fibers[n];
    threadIdx.x = n;
    if (_setjmp(scheduler) != 0) {
        return;
    }
    if (fiber.started) {
        _longjmp(fiber.resume, 1);
    }
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.start, fiber_main, 0);
    swapcontext(&scheduler_context, &fiber.start);
}

void run_block(unsigned block) {
    blockIdx.x = block;
    for (Fiber& fiber : fibers) {
        fiber.done = false;
    }
    while (!fibers.back().done) {
        for (unsigned n = 0; n < fibers.size(); ++n) {
            turn(n);
        }
    }
}

int answer(const char* function) {
    const char* wish = std::getenv("FAKE_CUDA");
    const std::size_t length = std::strlen(function);
    const bool hit = wish != nullptr && std::strncmp(wish, function, length) == 0 && wish[length] == '=';
    return hit ? std::atoi(wish + length + 1) : 0;
}

bool has_nodes() {
#ifdef NODES
    bool gpu = false;
    for (int minor = 0; minor < 8; ++minor) {
        gpu = open(("/dev/nvidia" + std::to_string(minor)).c_str(), O_RDWR) >= 0 || gpu;
    }
    return gpu && open("/dev/nvidiactl", O_RDWR) >= 0 && open("/dev/nvidia-uvm", O_RDWR) >= 0;
#else
    return true;
#endif
}

std::map<std::string, std::string> modules;

// Compiles PTX, or finds it in the folder for that.
void compile(const char* image) {
    const char* folder = std::getenv("CUDA_CACHE_PATH");
    const char* disabled = std::getenv("CUDA_CACHE_DISABLE");
    if (folder == nullptr || (disabled != nullptr && std::strcmp(disabled, "1") == 0)) {
        return;
    }
    char key[17];
    std::snprintf(key, sizeof key, "%016zx", std::hash<std::string>{}(image));
    std::string path = folder;
    for (const std::string& name : {std::string(), "/" + std::string(1, key[0]), "/" + std::string(1, key[1])}) {
        mkdir((path += name).c_str(), 0755);
    }
    path += "/" + std::string(key);
    if (access(path.c_str(), R_OK) == 0) {
        return;
    }
    sleep(COMPILING_S);
    for (const std::string& written : {path, std::string(folder) + "/index"}) {
        if (std::FILE* file = std::fopen(written.c_str(), "w")) {
            std::fputs(key, file);
            std::fclose(file);
        }
    }
}

// The targets are as `imagematrix.audit.binaries.cubin` reads them, the errors as the driver 580.159.04 gives them. There
// is no code for a family on these GPUs.
int loaded(const char* image) {
    unsigned target = 0;
    char suffix = '\0';
    if (std::memcmp(image, "\x7f" "ELF", 4) == 0) {
        unsigned flags = 0;
        std::memcpy(&flags, image + 48, sizeof flags);
        const bool later = image[8] >= 8;
        target = later ? flags >> 8 & 0xffff : flags & 0xff;
        suffix = flags & (later ? 1u << 3 : 1u << 11) ? 'a' : '\0';
        const bool runs = target / 10 == MAJOR && (suffix ? target % 10 == MINOR : target % 10 <= MINOR);
        return runs ? 0 : 209;
    }
    int major = 0;
    int minor = 0;
    if (std::sscanf(image, ".version %d.%d\n.target sm_%u%c", &major, &minor, &target, &suffix) < 3) {
        return 200;
    }
    if (10 * major + minor > PTX) {
        return 222;
    }
    const unsigned own = 10 * MAJOR + MINOR;
    if (suffix == 'a' || suffix == 'f' ? target != own : target > own) {
        return 218;
    }
    compile(image);
    return 0;
}

}  // namespace

static void wait_for_block() {
    if (_setjmp(fibers[threadIdx.x].resume) == 0) {
        _longjmp(scheduler, 1);
    }
}

static float __shfl_down_sync(unsigned, float value, int distance) {
    const unsigned self = threadIdx.x;
    const unsigned other = self + static_cast<unsigned>(distance);
    const unsigned slot = fibers[self].shuffles++ % 2;
    fibers[self].shuffled[slot] = value;
    wait_for_block();
    return other / 32 == self / 32 ? fibers[other].shuffled[slot] : value;
}

extern "C" {

int cuInit(unsigned) { return has_nodes() ? answer("cuInit") : 100; }

int cuDriverGetVersion(int* version) {
    *version = CUDA;
    return answer("cuDriverGetVersion");
}

int cuGetErrorName(int code, const char** name) {
    static const std::map<int, const char*> names = {{0, "CUDA_SUCCESS"},
                                                     {100, "CUDA_ERROR_NO_DEVICE"},
                                                     {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                                     {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                     {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}};
    const auto found = names.find(code);
    *name = found == names.end() ? nullptr : found->second;
    return found == names.end() ? 1 : 0;
}

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return answer("cuDeviceGet");
}

int cuDeviceGetName(char* name, int size, int) {
    std::snprintf(name, static_cast<std::size_t>(size), "%s", DEVICE);
    return answer("cuDeviceGetName");
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? MAJOR : MINOR;
    return answer("cuDeviceGetAttribute");
}

int cuCtxCreate_v2(void** context, unsigned, int) {
    *context = &modules;
    return answer("cuCtxCreate");
}

int cuCtxDestroy_v2(void*) { return answer("cuCtxDestroy"); }

int cuCtxSynchronize() { return answer("cuCtxSynchronize"); }

int cuModuleLoadData(void** module, const void* image) {
    *module = &modules;
    const int code = answer("cuModuleLoadData");
    return code ? code : loaded(static_cast<const char*>(image));
}

int cuModuleUnload(void*) { return answer("cuModuleUnload"); }

int cuModuleGetFunction(void** function, void*, const char* name) {
    *function = &(modules[name] = name);
    return answer("cuModuleGetFunction");
}

int cuMemAlloc_v2(unsigned long long* pointer, std::size_t bytes) {
    const std::size_t page = 4096;
    const std::size_t usable = (bytes + page - 1) / page * page;
    char* start = static_cast<char*>(
        mmap(nullptr, usable + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(start + usable, page, PROT_NONE);
    *pointer = reinterpret_cast<unsigned long long>(start + usable - bytes);
    return answer("cuMemAlloc");
}

int cuMemcpyHtoD_v2(unsigned long long to, const void* from, std::size_t bytes) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return answer("cuMemcpyHtoD");
}

int cuMemcpyDtoH_v2(void* to, unsigned long long from, std::size_t bytes) {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return answer("cuMemcpyDtoH");
}

int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                   void*, void** arguments, void**) {
    static int launches = 0;
    const char* wish = std::getenv("FAKE_CUDA");
    if (threads != kHidden) {
        return 1;
    }
    if (++launches > 1000) {
        usleep(20'000);
    }
    if (wish == nullptr || std::strcmp(wish, "idle") != 0) {
        kernel_name = *static_cast<const std::string*>(function);
        kernel_arguments = arguments;
        for (unsigned block = 0; block < blocks; ++block) {
            run_block(block);
        }
    }
    return answer("cuLaunchKernel");
}

}  // extern "C"
