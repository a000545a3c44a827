"""A stand-in for NVIDIA's MPS daemon: a process of its name that listens where the daemon does."""

import contextlib
import subprocess
import sys

# As the daemon of driver 550.163.01 does. The kernel shows 15 characters of its name.
PROGRAM = """\
import socket, sys
with open("/proc/self/comm", "w") as comm:
    comm.write(sys.argv[2])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def daemon(folder, name="nvidia-cuda-mps"):
    """Let a process of this name listen on the control socket in a folder."""
    command = [sys.executable, "-c", PROGRAM, str(folder / "control"), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
