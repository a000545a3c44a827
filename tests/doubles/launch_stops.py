"""A launch that stops at a step of its order, for tests that kill its processes there.

`python launch_stops.py STEP FOLDER WORDS...` runs imagematrix with these words. At the step it creates the
file `stopped` in the folder, and goes on when there is a file `go`.
"""

import os
import sys
import time
from pathlib import Path

from imagematrix.cli import dispatch
from imagematrix.launcher.daemonless import start
from imagematrix.launcher.daemonless.lease_holder import LeaseHolder

# The method or function of the order before which, or after which, a launch stops.
BEFORE = {
    "leased": (start, "hide_arguments"),
    "forked": (LeaseHolder, "_await_first_process"),
    "standing": (LeaseHolder, "_name_first_process"),
}
AFTER = {"named": (LeaseHolder, "_name_first_process")}
BEFORE["open"] = (LeaseHolder, "_watch")
STEPS = ("leased", "forked", "standing", "named", "open")


def stop(folder):
    (folder / "stopped.new").write_text(str(os.getpid()))
    (folder / "stopped.new").rename(folder / "stopped")
    while not (folder / "go").exists():
        time.sleep(0.01)


def stopping(function, folder, *, before):
    def call(*words, **named):
        if before:
            stop(folder)
        result = function(*words, **named)
        if not before:
            stop(folder)
        return result

    return call


def main():
    step, folder, *words = sys.argv[1:]
    owner, name = (BEFORE | AFTER)[step]
    setattr(owner, name, stopping(getattr(owner, name), Path(folder), before=step in BEFORE))
    sys.exit(dispatch.run_command(words))


if __name__ == "__main__":
    main()
