"""A job for Spark: squares numbers on the GPUs of all workers, each task on the GPU that Spark gave it.

    spark-node submit CONF /usr/local/bin/squares.py [TASKS]

CONF is --conf spark.task.resource.gpu.amount=1 --conf spark.executor.resource.gpu.amount=1.

It prints a line for each task: its GPU's UUID and name, and whether the result is right.
"""

import array
import ctypes
import os
import sys
from pathlib import Path

COUNT = 1 << 20
CUBIN = Path("/usr/local/share/squares/squares.cubin")


def on_gpu(uuid, numbers):
    """Square an array of floats on the GPU with this UUID; return the name of the GPU and the squares."""
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        code = getattr(cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    memory, size = ctypes.c_uint64(), ctypes.c_size_t(len(numbers) * numbers.itemsize)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDeviceGetName", name, len(name), device)
    call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    try:
        call("cuModuleLoadData", ctypes.byref(module), CUBIN.read_bytes())
        call("cuModuleGetFunction", ctypes.byref(function), module, b"squares")
        call("cuMemAlloc_v2", ctypes.byref(memory), size)
        call("cuMemcpyHtoD_v2", memory, ctypes.c_void_p(numbers.buffer_info()[0]), size)
        values = memory, ctypes.c_int(len(numbers))
        arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        call("cuLaunchKernel", function, 256, 1, 1, 256, 1, 1, 0, None, arguments, None)
        result = array.array("f", bytes(size.value))
        call("cuMemcpyDtoH_v2", ctypes.c_void_p(result.buffer_info()[0]), memory, size)
    finally:
        call("cuCtxDestroy_v2", context)
    return name.value.decode(), result


def task(_):
    """Square numbers on the GPU of this task."""
    from pyspark import TaskContext

    (uuid,) = TaskContext.get().resources()["gpu"].addresses
    numbers = array.array("f", (n % 1000 for n in range(COUNT)))
    name, result = on_gpu(uuid, numbers)
    return uuid, name, all(square == n * n for n, square in zip(numbers, result, strict=True))


def main(tasks):
    """Run so many tasks, and print what each found."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("squares").getOrCreate()
    found = spark.sparkContext.parallelize(range(tasks), tasks).map(task).collect()
    spark.stop()
    for uuid, name, right in found:
        print(uuid, name, "right" if right else "WRONG")
    sys.exit(not all(right for _, _, right in found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
