/* A libnvidia-ml.so.1 that simulates the host that a test describes in these variables:
 *
 * STUB_INIT    the result of nvmlInitWithFlags (0)
 * STUB_SLEEP   seconds before nvmlInitWithFlags returns
 * STUB_DRIVER  the driver version
 * STUB_GPUS    GPUs separated by ';', each with fields "key=value" separated by ',':
 *              handle= and query=: error codes of getting the GPU, and of every query of it,
 *              bus= dev= (hex) uuid= minor= name= cc=9.0 brand= mib= (-1: not supported) virt=
 *              mig= (-1: not supported), migs=GI:CI:MIB:PROFILE separated by '/', with a gap after each,
 *              used= (MiB) kept= (MiB, reserved by the driver), util= temp= persist= (each -1: not supported),
 *              procs=PID:GI:CI separated by '/' (GI and CI -1: on no MIG device; procs=-1: not supported;
 *              procs=open: the processes that have the node open, with each= MiB for each; apart= is added to
 *              their PIDs, as if they were in another PID namespace),
 *              old=1: without the newer calls for processes and memory
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, FUNCTION_NOT_FOUND = 13, GPUS = 16, MIGS = 8, LENGTH = 512 };

typedef struct {
    char fields[LENGTH];
    char mig[64];
} Device;

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char address[32];
} Pci;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;

typedef struct {
    unsigned gpu, memory;
} Utilization;

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} Process;

static Device gpus[GPUS], migs[GPUS * MIGS];

static const char *env(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static const char *field(const Device *device, const char *key, const char *otherwise) {
    static char value[LENGTH];
    size_t length = strlen(key);
    for (const char *at = device->fields; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, key, length) && at[length] == '=') {
            size_t size = strcspn(at + length + 1, ",");
            memcpy(value, at + length + 1, size);
            value[size] = 0;
            return value;
        }
    return otherwise;
}

static int number(const Device *device, const char *key, int otherwise) {
    const char *text = field(device, key, NULL);
    return text ? atoi(text) : otherwise;
}

static int text(const char *value, char *out, unsigned size) {
    snprintf(out, size, "%s", value);
    return 0;
}

static int setting(const Device *device, const char *key, int otherwise, unsigned *out) {
    int value = number(device, key, otherwise);
    if (number(device, "query", 0)) return number(device, "query", 0);
    if (value < 0) return NOT_SUPPORTED;
    *out = (unsigned)value;
    return 0;
}

/* A MIG device's own text: "GI:CI:MIB:PROFILE". */
static unsigned part(const Device *device, int index) {
    const char *at = device->mig;
    while (index--) at = strchr(at, ':') + 1;
    return (unsigned)atoi(at);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    sleep((unsigned)atoi(env("STUB_SLEEP", "0")));
    return atoi(env("STUB_INIT", "0"));
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    const char *at = env("STUB_GPUS", "");
    for (*count = 0; *at && *count < GPUS; ++*count) {
        size_t size = strcspn(at, ";");
        memcpy(gpus[*count].fields, at, size);
        gpus[*count].fields[size] = 0;
        at += size + (at[size] == ';');
    }
    return 0;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text(env("STUB_DRIVER", "550.163.01"), out, size); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    *out = &gpus[index];
    return number(*out, "handle", 0);
}

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *out) {
    if (number(device, "query", 0)) return number(device, "query", 0);
    memset(out, 0, sizeof *out);
    out->id = ((unsigned)strtoul(field(device, "dev", "2330"), NULL, 16) << 16) | 0x10de;
    return text(field(device, "bus", "00000000:01:00.0"), out->address, sizeof out->address);
}

int nvmlDeviceGetUUID(Device *device, char *out, unsigned size) {
    if (*device->mig) return snprintf(out, size, "MIG-%u-%u", part(device, 0), part(device, 1)), 0;
    return number(device, "query", 0) ? number(device, "query", 0) : text(field(device, "uuid", "GPU-1"), out, size);
}

int nvmlDeviceGetName(Device *device, char *out, unsigned size) {
    if (*device->mig) return snprintf(out, size, "NVIDIA H100 MIG %s", strrchr(device->mig, ':') + 1), 0;
    return number(device, "query", 0) ? number(device, "query", 0) : text(field(device, "name", "NVIDIA H100"), out, size);
}

int nvmlDeviceGetMinorNumber(Device *device, unsigned *out) { return setting(device, "minor", 0, out); }

int nvmlDeviceGetBrand(Device *device, unsigned *out) { return setting(device, "brand", 14, out); }

int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    sscanf(field(device, "cc", "9.0"), "%d.%d", major, minor);
    return number(device, "query", 0);
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *out) {
    unsigned mib = *device->mig ? part(device, 2) : 0;
    int code = *device->mig ? 0 : setting(device, "mib", 81559, &mib);
    out->total = (unsigned long long)mib << 20;
    out->used = (unsigned long long)(number(device, "used", 0) + number(device, "kept", 0)) << 20;
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) {
    Memory older = {0};
    int code = nvmlDeviceGetMemoryInfo(device, &older);
    if (number(device, "old", 0)) return FUNCTION_NOT_FOUND;
    out->total = older.total;
    out->reserved = (unsigned long long)number(device, "kept", 0) << 20;
    out->used = older.used - out->reserved;
    return code;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
    out->memory = 0;
    return setting(device, "util", 0, &out->gpu);
}

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *out) {
    (void)sensor;
    return setting(device, "temp", 30, out);
}

int nvmlDeviceGetPersistenceMode(Device *device, unsigned *out) { return setting(device, "persist", 1, out); }

/* The processes that have a device node of this name open, in whatever folder they see it. */
static unsigned openers(const Device *device, Process *out, unsigned room) {
    unsigned long long memory = (unsigned long long)number(device, "each", 0) << 20;
    char node[32], path[300], target[32];
    unsigned count = 0, pid;
    DIR *processes = opendir("/proc"), *files;
    snprintf(node, sizeof node, "/dev/nvidia%d", number(device, "minor", 0));
    for (struct dirent *process, *file; (process = readdir(processes));) {
        snprintf(path, sizeof path, "/proc/%s/fd", process->d_name);
        if (!atoi(process->d_name) || !(files = opendir(path))) continue;
        while ((file = readdir(files))) {
            ssize_t length = readlinkat(dirfd(files), file->d_name, target, sizeof target);
            if (length != (ssize_t)strlen(node) || memcmp(target, node, (size_t)length)) continue;
            pid = (unsigned)(atoi(process->d_name) + number(device, "apart", 0));
            if (count++ < room) out[count - 1] = (Process){pid, memory, ~0u, ~0u};
            break;
        }
        closedir(files);
    }
    closedir(processes);
    return count;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device *device, unsigned *count, Process *out) {
    const char *at = field(device, "procs", "");
    unsigned room = *count;
    if (number(device, "query", 0)) return number(device, "query", 0);
    if (!strcmp(at, "-1")) return NOT_SUPPORTED;
    if (!strcmp(at, "open")) return (*count = openers(device, out, room)) > room ? INSUFFICIENT_SIZE : 0;
    for (*count = 0; *at; ++*count) {
        int pid = 0, gpu = -1, compute = -1;
        sscanf(at, "%d:%d:%d", &pid, &gpu, &compute);
        if (out && *count < room) out[*count] = (Process){(unsigned)pid, 0, (unsigned)gpu, (unsigned)compute};
        at += strcspn(at, "/");
        at += *at == '/';
    }
    return *count > room ? INSUFFICIENT_SIZE : 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
    return number(device, "old", 0) ? FUNCTION_NOT_FOUND : nvmlDeviceGetComputeRunningProcesses_v2(device, count, out);
}

int nvmlDeviceGetVirtualizationMode(Device *device, unsigned *out) { return setting(device, "virt", 0, out); }

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    *pending = 0;
    return setting(device, "mig", -1, current);
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    (void)device;
    *count = MIGS;
    return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out) {
    const char *at = field(device, "migs", "");
    if (index % 2 || !*at) return NOT_FOUND;
    for (unsigned skipped = 0; skipped < index / 2; ++skipped) {
        at = strchr(at, '/');
        if (!at++) return NOT_FOUND;
    }
    *out = &migs[(device - gpus) * MIGS + index];
    snprintf((*out)->mig, sizeof (*out)->mig, "%.*s", (int)strcspn(at, "/"), at);
    return 0;
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *out) { return *out = part(device, 0), 0; }

int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *out) { return *out = part(device, 1), 0; }

const char *nvmlErrorString(int code) {
    static char message[32];
    snprintf(message, sizeof message, "stub error %d", code);
    return message;
}
