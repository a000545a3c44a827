// compile_kernel SOURCE TARGET RELEASE FOLDER: compiles CUDA C++ to FOLDER/kernel.cubin for one target (sm_89)
// with NVRTC, which needs no headers and no host compiler, and writes what it is to FOLDER/kernel.txt. Fails
// unless this machine's NVRTC is of the CUDA release asked for.
#include <dlfcn.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace {

// The part of nvrtc.h that is used here.
using nvrtcResult = int;
using nvrtcProgram = struct nvrtcProgramState*;

struct Nvrtc {
    nvrtcResult (*version)(int* major, int* minor);
    const char* (*error_string)(nvrtcResult result);
    nvrtcResult (*create)(nvrtcProgram* program, const char* source, const char* name, int headers,
                          const char* const* header_sources, const char* const* header_names);
    nvrtcResult (*compile)(nvrtcProgram program, int options, const char* const* option_words);
    nvrtcResult (*log_size)(nvrtcProgram program, std::size_t* size);
    nvrtcResult (*log)(nvrtcProgram program, char* text);
    nvrtcResult (*cubin_size)(nvrtcProgram program, std::size_t* size);
    nvrtcResult (*cubin)(nvrtcProgram program, char* bytes);

    void check(nvrtcResult result, const char* call) const {
        if (result != 0) {
            throw std::runtime_error(std::string(call) + ": " + error_string(result));
        }
    }
};

template <typename Function>
void resolve(void* library, const char* symbol, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, symbol));
    if (function == nullptr) {
        throw std::runtime_error(std::string("NVRTC has no ") + symbol);
    }
}

// NVRTC's file is named after its major release; CUDA 11.2 and all later 11 share one name.
Nvrtc load(const std::string& release) {
    const std::string major = release.substr(0, release.find('.'));
    const std::string file = "libnvrtc.so." + (major == "11" ? "11.2" : major);
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::runtime_error(dlerror());
    }
    Nvrtc nvrtc{};
    resolve(library, "nvrtcVersion", nvrtc.version);
    resolve(library, "nvrtcGetErrorString", nvrtc.error_string);
    resolve(library, "nvrtcCreateProgram", nvrtc.create);
    resolve(library, "nvrtcCompileProgram", nvrtc.compile);
    resolve(library, "nvrtcGetProgramLogSize", nvrtc.log_size);
    resolve(library, "nvrtcGetProgramLog", nvrtc.log);
    resolve(library, "nvrtcGetCUBINSize", nvrtc.cubin_size);
    resolve(library, "nvrtcGetCUBIN", nvrtc.cubin);

    int have_major = 0;
    int have_minor = 0;
    nvrtc.check(nvrtc.version(&have_major, &have_minor), "nvrtcVersion");
    const std::string have = std::to_string(have_major) + "." + std::to_string(have_minor);
    if (have != release) {
        throw std::runtime_error("NVRTC is of CUDA " + have + ", not " + release);
    }
    return nvrtc;
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error("cannot read " + path);
    }
    return std::string(std::istreambuf_iterator<char>(file), {});
}

void write(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary);
    file << bytes;
    if (!file.flush()) {
        throw std::runtime_error("cannot write " + path);
    }
}

std::string compile(const Nvrtc& nvrtc, const std::string& path, const std::string& target) {
    nvrtcProgram program = nullptr;
    nvrtc.check(nvrtc.create(&program, read(path).c_str(), path.c_str(), 0, nullptr, nullptr), "nvrtcCreateProgram");
    // A real architecture (sm_, not compute_) makes NVRTC go all the way to machine code.
    const std::string architecture = "--gpu-architecture=" + target;
    const char* options[] = {architecture.c_str(), "--std=c++17", "--include-path=."};
    const nvrtcResult result = nvrtc.compile(program, 3, options);

    std::size_t size = 0;
    nvrtc.check(nvrtc.log_size(program, &size), "nvrtcGetProgramLogSize");
    std::string log(size, '\0');
    nvrtc.check(nvrtc.log(program, log.data()), "nvrtcGetProgramLog");
    if (size > 1) {
        std::fprintf(stderr, "%s\n", log.c_str());
    }
    nvrtc.check(result, "nvrtcCompileProgram");

    nvrtc.check(nvrtc.cubin_size(program, &size), "nvrtcGetCUBINSize");
    std::string cubin(size, '\0');
    nvrtc.check(nvrtc.cubin(program, cubin.data()), "nvrtcGetCUBIN");
    return cubin;
}

}  // namespace

int main(int count, char** words) {
    if (count != 5) {
        std::fprintf(stderr, "usage: compile_kernel SOURCE TARGET RELEASE FOLDER\n");
        return 2;
    }
    try {
        const std::string target = words[2];
        const std::string release = words[3];
        const std::string folder = words[4];
        const std::string cubin = compile(load(release), words[1], target);
        write(folder + "/kernel.cubin", cubin);
        write(folder + "/kernel.txt", release + " " + target + "\n");
    } catch (const std::exception& error) {
        std::fprintf(stderr, "compile_kernel: %s\n", error.what());
        return 1;
    }
    return 0;
}
