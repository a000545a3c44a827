"""An nvidia-smi that answers the queries of the tests, from what NVML says."""

import sys

import pynvml as nvml

MIB = 1024 * 1024


def gpu(handle):
    """Return the fields of --query-gpu for one GPU."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    return {
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "name": nvml.nvmlDeviceGetName(handle),
        "compute_cap": "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "driver_version": nvml.nvmlSystemGetDriverVersion(),
        "pci.bus_id": nvml.nvmlDeviceGetPciInfo(handle).busId,
        "memory.total": memory.total // MIB,
        "memory.used": memory.used // MIB,
    }


def apps(handle):
    """Return the fields of --query-compute-apps for each process on one GPU."""
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return [{"gpu_uuid": uuid, "pid": one.pid} for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def main():
    """Print the rows of the one query in the arguments."""
    query, _, fields = sys.argv[1].partition("=")
    nvml.nvmlInit()
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        for row in apps(handle) if query == "--query-compute-apps" else [gpu(handle)]:
            sys.stdout.write(", ".join(str(row[field]) for field in fields.split(",")) + "\n")


main()
