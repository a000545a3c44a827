"""What all tests share: the same conditions wherever they run, under nohup and in a background job too."""

import os
import signal

import pytest
from hypothesis import settings

# Python itself ignores these, and subprocess gives them back to what it starts.
PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}

# Of tests/doubles; a module that another one imports comes first.
pytest_plugins = [
    "bare_install",
    "building",
    "choosing",
    "daemonless_starts",
    "downloading",
    "drivers",
    "publishing",
    "pruning",
    "staging",
    "storing",
]

# A busy machine is no failure. A change that is tested fails by what it changes, not by chance: new examples
# are for `make fuzz`.
settings.register_profile("test", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, derandomize=False, max_examples=2000)
settings.load_profile("fuzz" if "IMAGEMATRIX_FUZZ" in os.environ else "test")


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory):
    """Keep what commands remember out of the user's cache folder, and of what they remember there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _signals():
    """Let the programs that tests start receive every signal, whatever this process inherited.

    An ignored signal stays ignored across exec, one with a handler gets its default back (signal(7)). So a
    handler that does nothing leaves this process as deaf as it was, and its children as they usually are.
    """
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ignored = {
        number
        for number in signal.valid_signals() - PYTHONS_OWN
        if signal.getsignal(number) == signal.SIG_IGN
    }
    for number in ignored:
        interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if interrupt else lambda _number, _frame: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
