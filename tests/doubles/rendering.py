"""Processes that render templates, forked from one that has loaded Jinja: tests need a thousand of them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from imagematrix.build.dockerfile import render

SERVE = """
import json, os, socket, sys, traceback
sys.path[:] = json.loads(sys.argv[1])
from imagematrix.build.dockerfile import worker

control = socket.socket(fileno=int(sys.argv[2]))
while True:
    message, pipes, _, _ = socket.recv_fds(control, 1 << 16, 2)
    if not message:
        break
    request = json.loads(message)
    if "pid" in request:
        answer = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
    else:
        answer = os.fork()
        if answer == 0:
            control.close()
            for number, pipe in enumerate(pipes):
                os.dup2(pipe, number)
                os.close(pipe)
            os.setsid()
            os.chdir(request["folder"])
            sys.argv = request["words"]
            try:
                worker.main()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        for pipe in pipes:
            os.close(pipe)
    control.send(json.dumps(answer).encode())
"""


class Starter:
    """Stands for the module subprocess where Renderers start their processes. Use it as a context manager."""

    PIPE = subprocess.PIPE

    def __init__(self):
        self._lock = threading.Lock()
        self._control = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._control:
            self._control.close()
            self._process.wait()

    def Popen(self, command, *, stdin, stdout, start_new_session, env):  # noqa: N802 - as in subprocess
        """Start a process for a command of a Renderer."""
        *python, code, path, folder, seconds = command
        assert [*python, code] == [sys.executable, "-I", "-c", render.START]
        assert (stdin, stdout, start_new_session) == (self.PIPE, self.PIPE, True)
        ours, theirs = os.pipe(), os.pipe()
        request = {"folder": str(Path.cwd()), "words": ["-c", folder, seconds]}
        with self._lock:
            if self._control is None:
                self._start(path, env)
            pid = self._asked(request, ours[0], theirs[1])
        for pipe in (ours[0], theirs[1]):
            os.close(pipe)
        return _Process(self, pid, os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb"))

    def ended(self, pid):
        """Wait for the end of a process; return its exit code."""
        with self._lock:
            return self._asked({"pid": pid})

    def _start(self, path, env):
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            number = other.fileno()
            command = [sys.executable, "-I", "-c", SERVE, path, str(number)]
            self._process = subprocess.Popen(command, pass_fds=[number], env=env, stdin=subprocess.DEVNULL)

    def _asked(self, request, *pipes):
        socket.send_fds(self._control, [json.dumps(request).encode()], pipes)
        return json.loads(self._control.recv(1 << 10))


class _Process:
    def __init__(self, starter, pid, stdin, stdout):
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._starter = starter
        self._code = None

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        if self._code is None:
            self._code = self._starter.ended(self.pid)
        return self._code
