// Trains a small model, on the first GPU if this image has code for it and the node has one, else on the CPU.
// What it says to a person goes to stderr. stdout gets one line of JSON: what this program was built for and
// what it found. The exit status is 0 if the loss fell, 1 if anything went wrong, 2 for a wrong option.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>

#include "gpu.hpp"
#include "isa.hpp"
#include "model.hpp"
#include "shape.hpp"

namespace {

constexpr int kProgressLines = 5;
constexpr int kCheckedSteps = 16;
constexpr double kTolerance = 1e-3;

struct Options {
    int steps = 3000;
    std::uint64_t seed = 1;
    std::string cubin = "/usr/local/share/training/kernel.cubin";
};

// The device code of this image. Beside the cubin, in kernel.txt, its compiler left two words: the CUDA
// release and the target.
struct DeviceCode {
    std::string cubin;
    std::string cuda;
    std::string target;
};

struct Report {
    std::optional<DeviceCode> code;
    std::unique_ptr<Cuda> cuda;
    std::string backend;
    std::string error;
    double initial_loss = NAN;
    double final_loss = NAN;
    double check_cpu = NAN;
    double check_gpu = NAN;
    double samples_per_second = NAN;
};

[[noreturn]] void usage(const std::string& what) {
    std::fprintf(stderr, "train: %s\nusage: train [--steps N] [--seed N] [--cubin FILE]\n", what.c_str());
    std::exit(2);
}

std::uint64_t number(const std::string& option, const std::string& text, std::uint64_t most) {
    const bool digits = !text.empty() && text.size() < 19 && text.find_first_not_of("0123456789") == std::string::npos;
    const std::uint64_t value = digits ? std::strtoull(text.c_str(), nullptr, 10) : 0;
    if (!digits || value > most) {
        usage(option + " takes a number up to " + std::to_string(most) + ", not \"" + text + "\"");
    }
    return value;
}

Options parse(int count, char** words) {
    Options options;
    for (int n = 1; n < count; n += 2) {
        const std::string option = words[n];
        if (option != "--steps" && option != "--seed" && option != "--cubin") {
            usage("unknown option \"" + option + "\"");
        }
        if (n + 1 == count) {
            usage(option + " takes a value");
        }
        const std::string value = words[n + 1];
        if (option == "--steps") {
            options.steps = static_cast<int>(number(option, value, 1'000'000'000));
        } else if (option == "--seed") {
            options.seed = number(option, value, 1'000'000'000);
        } else {
            options.cubin = value;
        }
    }
    return options;
}

std::optional<DeviceCode> read_device_code(const std::string& path) {
    std::ifstream cubin(path, std::ios::binary);
    if (!cubin) {
        return std::nullopt;
    }
    DeviceCode code;
    code.cubin.assign(std::istreambuf_iterator<char>(cubin), {});
    std::ifstream(path.substr(0, path.rfind('.')) + ".txt") >> code.cuda >> code.target;
    return code;
}

// A node without a GPU is no error. A driver that refuses to work is one: then this image is not the one for
// this node, and to go on quietly on the CPU would hide it.
bool use_gpu(const Report& report, const std::string& why_not_loaded) {
    if (report.cuda == nullptr) {
        std::fprintf(stderr, "train: no CUDA driver in this image (%s)\n", why_not_loaded.c_str());
        return false;
    }
    const Cuda& cuda = *report.cuda;
    std::fprintf(stderr, "train: libcuda %s knows CUDA %d.%d; cuInit answered %d %s\n", cuda.version.c_str(),
                 cuda.supported / 1000, cuda.supported % 1000 / 10, cuda.init, cuda.init_name.c_str());
    if (cuda.init == Cuda::kNoDevice) {
        return false;
    }
    if (cuda.init != 0) {
        throw CudaError("cuInit answered " + std::to_string(cuda.init) + " " + cuda.init_name);
    }
    std::fprintf(stderr, "train: the GPU is %s, compute capability %s\n", cuda.device.c_str(),
                 cuda.compute.c_str());
    if (!report.code) {
        std::fprintf(stderr, "train: this image has no device code\n");
    }
    return report.code.has_value();
}

// Does the first steps on both devices: the same arithmetic in another order must give nearly the same loss.
void check_gpu(Report& report, const Options& options, const Data& data, const Weights& weights) {
    const int steps = std::min(options.steps, kCheckedSteps);
    const auto cpu = make_cpu_model(data, weights);
    const auto gpu = make_gpu_model(*report.cuda, report.code->cubin, data, weights);
    cpu->train(0, steps);
    gpu->train(0, steps);
    report.check_cpu = cpu->loss();
    report.check_gpu = gpu->loss();
    std::fprintf(stderr, "train: after %d steps the loss is %.6f on the CPU and %.6f on the GPU\n", steps,
                 report.check_cpu, report.check_gpu);
    // Written so that a NaN is a difference too.
    if (!(std::abs(report.check_gpu - report.check_cpu) <= kTolerance * report.check_cpu)) {
        throw CudaError("the GPU computes something else than the CPU");
    }
}

void run(Report& report, const Options& options) {
    const Data data = make_data(options.seed);
    const Weights weights = make_weights(options.seed);
    report.code = read_device_code(options.cubin);
    std::string why_not_loaded;
    report.cuda = Cuda::load(why_not_loaded);

    std::unique_ptr<Model> model;
    if (use_gpu(report, why_not_loaded)) {
        check_gpu(report, options, data, weights);
        model = make_gpu_model(*report.cuda, report.code->cubin, data, weights);
        report.backend = "gpu";
    } else {
        model = make_cpu_model(data, weights);
        report.backend = "cpu";
    }
    std::fprintf(stderr, "train: training on the %s\n", report.backend == "gpu" ? "GPU" : "CPU");

    report.initial_loss = report.final_loss = model->loss();
    std::fprintf(stderr, "train: step %7d  loss %.6f\n", 0, report.initial_loss);
    double seconds = 0;
    const long long lines = std::min(options.steps, kProgressLines);
    for (int line = 0; line < lines; ++line) {
        const int first = static_cast<int>(options.steps * line / lines);
        const int last = static_cast<int>(options.steps * (line + 1) / lines);
        const auto start = std::chrono::steady_clock::now();
        model->train(first, last);
        seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        report.final_loss = model->loss();
        std::fprintf(stderr, "train: step %7d  loss %.6f\n", last, report.final_loss);
    }
    report.samples_per_second = static_cast<double>(options.steps) * kBatch / seconds;
    if (!(report.final_loss < report.initial_loss)) {
        report.error = "the loss did not fall";
    }
}

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char character : text) {
        if (character == '"' || character == '\\') {
            out += '\\';
        }
        // Names of devices and errors are ASCII; what is not can't break the line.
        out += character >= ' ' && character <= '~' ? character : '?';
    }
    return out + '"';
}

std::string quoted_or_null(const std::string& text) { return text.empty() ? "null" : quoted(text); }

std::string real_or_null(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return std::isfinite(value) ? text : "null";
}

std::string json(const Report& report, const Options& options) {
    std::string isa;
    std::istringstream names(TRAIN_ISA);
    for (std::string name; names >> name;) {
        isa += (isa.empty() ? "" : ", ") + quoted(name);
    }
    const Cuda* cuda = report.cuda.get();
    const std::string init =
        cuda == nullptr ? "null"
                        : "{\"code\": " + std::to_string(cuda->init) + ", \"name\": " + quoted(cuda->init_name) + "}";
    const std::string check = std::isnan(report.check_cpu)
                                  ? "null"
                                  : "{\"cpu_loss\": " + real_or_null(report.check_cpu) +
                                        ", \"gpu_loss\": " + real_or_null(report.check_gpu) + "}";
    std::string out = "{\"march\": " + quoted(TRAIN_MARCH);
    out += ", \"compiler\": " + quoted("gcc " __VERSION__);
    out += ", \"isa\": [" + isa + "]";
    out += ", \"cuda\": " + quoted_or_null(report.code ? report.code->cuda : "");
    out += ", \"cubin\": " + quoted_or_null(report.code ? report.code->target : "");
    out += ", \"libcuda\": " + quoted_or_null(cuda == nullptr ? "" : cuda->version);
    out += ", \"driver_cuda\": " + (cuda == nullptr ? "null" : std::to_string(cuda->supported));
    out += ", \"cuinit\": " + init;
    out += ", \"device\": " + quoted_or_null(cuda == nullptr ? "" : cuda->device);
    out += ", \"compute\": " + quoted_or_null(cuda == nullptr ? "" : cuda->compute);
    out += ", \"backend\": " + quoted_or_null(report.backend);
    out += ", \"steps\": " + std::to_string(options.steps);
    out += ", \"seed\": " + std::to_string(options.seed);
    out += ", \"initial_loss\": " + real_or_null(report.initial_loss);
    out += ", \"final_loss\": " + real_or_null(report.final_loss);
    out += ", \"check\": " + check;
    out += ", \"samples_per_second\": " + real_or_null(report.samples_per_second);
    out += ", \"threads\": 1";
    out += ", \"error\": " + quoted_or_null(report.error);
    return out + "}";
}

}  // namespace

int main(int count, char** words) {
    const Options options = parse(count, words);
    Report report;
    try {
        run(report, options);
    } catch (const std::exception& error) {
        report.error = error.what();
    }
    if (!report.error.empty()) {
        std::fprintf(stderr, "train: %s\n", report.error.c_str());
    }
    std::printf("%s\n", json(report, options).c_str());
    return report.error.empty() ? 0 : 1;
}
