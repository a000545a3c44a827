"""What a launch does while it waits for GPUs: it says why, and then probes the node again."""

from __future__ import annotations

from imagematrix.cli.shared.output import print_info

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.hardware.host.host import Host


class GpuWait:
    """A wait for GPUs, during which a GPU may fail and the driver may change.

    `probe` reads this node; None if the launch is for a saved host. `latest` is the host as it was last read.
    """

    def __init__(self, probe: Callable[[], Host] | None) -> None:
        self._probe = probe
        self._began = False
        self.latest: Host | None = None

    def print_reason(self, reason: str) -> None:
        """Print the reason for waiting."""
        self._began = True
        print_info(reason)

    def probe_again(self) -> Host | None:
        """Return this node's host as it is after a wait; None before one, and for a saved host."""
        if self._began and self._probe:
            self.latest = self._probe()
        return self.latest
