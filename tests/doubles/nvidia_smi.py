"""An nvidia-smi that prints its XML dump from NVML's readings."""

import sys

import pynvml as nvml

MIB = 1024 * 1024


def dump():
    """Return the output of -q -x, as far as the tests read it."""
    lines = ['<?xml version="1.0" ?>', "<nvidia_smi_log>"]
    lines.append(f"<driver_version>{nvml.nvmlSystemGetDriverVersion()}</driver_version>")
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        bus = nvml.nvmlDeviceGetPciInfo(handle).busId
        lines.append(
            f'<gpu id="{bus}"><product_name>{nvml.nvmlDeviceGetName(handle)}</product_name>'
            f"<uuid>{nvml.nvmlDeviceGetUUID(handle)}</uuid><serial>1652922003123</serial>"
            f"<minor_number>{nvml.nvmlDeviceGetMinorNumber(handle)}</minor_number>"
            f"<pci><pci_bus_id>{bus}</pci_bus_id></pci>"
            f"<fb_memory_usage><total>{memory.total // MIB} MiB</total>"
            f"<used>{memory.used // MIB} MiB</used></fb_memory_usage></gpu>"
        )
    return "\n".join([*lines, "</nvidia_smi_log>", ""])


def main():
    """Print the dump, the only supported output."""
    if sys.argv[1:] != ["-q", "-x"]:
        sys.exit(f"nvidia-smi: {sys.argv[1:]}")
    nvml.nvmlInit()
    sys.stdout.write(dump())


main()
