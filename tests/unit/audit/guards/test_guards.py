"""On which GPUs a package uses its files with device code, by its own sources."""

import textwrap
from functools import partial
from pathlib import Path

import pytest
from counting import counted

import imagematrix
from imagematrix.audit.guards import capability_queries, guards, module_reading, modules
from imagematrix.audit.guards.evaluation import StepBudget
from imagematrix.audit.guards.guards import STEPS, find_guards

PACKAGE = Path(imagematrix.__file__).parent
EVERY = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "13.0")
HOPPER = "pkg/_hopper_C.abi3.so"
FILES = (HOPPER, "pkg/_other_C.abi3.so", "pkg/sm90/ops.so", "pkg/sm80/ops.so")
CAPABILITY = "torch.cuda.get_device_capability()"
MAJOR = f"{CAPABILITY}[0]"


def told(sources, file=HOPPER):
    """Return the guard of a file in a package with these modules."""
    texts = {f"pkg/{name}": textwrap.dedent(text).encode() for name, text in sources.items()}
    return find_guards(texts, FILES, EVERY, StepBudget(STEPS)).get(file)


def used(source, file=HOPPER, **others):
    """Return the capabilities that use a file, None if no question guards it."""
    guard = told({"it.py": source, **{f"{name}.py": text for name, text in others.items()}}, file)
    return guard and sorted(guard.used, key=EVERY.index)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("torch.cuda.get_device_capability() == (9, 0)", ["9.0"]),
        ("torch.cuda.get_device_capability(device)[0] == 9", ["9.0"]),
        ("torch.cuda.get_device_capability() >= (9, 0)", ["9.0", "10.0", "12.0", "13.0"]),
        ("(9, 0) <= torch.cuda.get_device_capability() < (10, 0)", ["9.0"]),
        ("torch.cuda.get_device_capability()[0] in (9, 10)", ["9.0", "10.0"]),
        ("torch.cuda.get_device_capability() in [(8, 6), (8, 9)]", ["8.6", "8.9"]),
        ("torch.cuda.get_device_capability()[0] not in {8}", ["7.5", "9.0", "10.0", "12.0", "13.0"]),
        ("current_platform.has_device_capability(90)", ["9.0", "10.0", "12.0", "13.0"]),
        ("current_platform.has_device_capability((8, 9))", ["8.9", "9.0", "10.0", "12.0", "13.0"]),
        ("current_platform.is_device_capability(90)", ["9.0"]),
        ("current_platform.is_device_capability_family(100)", ["10.0"]),
        ("current_platform.get_device_capability().to_int() == 90", ["9.0"]),
        ("current_platform.get_device_capability().major == 9", ["9.0"]),
        ("torch.cuda.get_device_properties(0).major == 9", ["9.0"]),
        ("pynvml.nvmlDeviceGetCudaComputeCapability(handle)[0] == 9", ["9.0"]),
        ("cupy.cuda.Device().compute_capability == '90'", ["9.0"]),
        ("int(cupy.cuda.Device().compute_capability) >= 90", ["9.0", "10.0", "12.0", "13.0"]),
        ("cuda.get_current_device().compute_capability >= (9, 0)", ["9.0", "10.0", "12.0", "13.0"]),
        ("float(jax.devices()[0].compute_capability) >= 9.0", ["9.0", "10.0", "12.0", "13.0"]),
        ("get_sm_version() == 90", ["9.0"]),
        ("is_sm90_supported()", ["9.0"]),
        ("is_sm100a_supported(device)", ["10.0"]),
        ("cuda_capability_geq(9, 0)", ["9.0", "10.0", "12.0", "13.0"]),
        ("torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9", ["9.0"]),
        ("torch.cuda.get_device_capability()[0] == 9 and torch.version.cuda >= '12.3'", ["9.0"]),
        ("not torch.cuda.get_device_capability() < (9, 0)", ["9.0", "10.0", "12.0", "13.0"]),
        # Inverted, or too wide: there the file decides.
        ("torch.cuda.get_device_capability() < (9, 0)", ["7.5", "8.0", "8.6", "8.9"]),
        ("torch.cuda.get_device_capability()[0] != 9", ["7.5", "8.0", "8.6", "8.9", "10.0", "12.0", "13.0"]),
        ("torch.cuda.get_device_capability()[0] >= 8", [*EVERY[1:]]),
    ],
)
def test_load_in_a_function_is_reached_where_its_condition_holds(condition, expected):
    assert used(f"def use():\n    if {condition}:\n        from pkg import _hopper_C\n") == expected
    assert used(f"if {condition}:\n    from pkg import _hopper_C\n") == expected
    assert (
        used(f"def use():\n    if not ({condition}):\n        return None\n    import pkg._hopper_C\n")
        == expected
    )
    assert used(f"def use():\n    assert {condition}\n    from . import _hopper_C\n") == expected
    helper = f"def _is():\n    return {condition}\n"
    assert used(f"{helper}def use():\n    if _is():\n        from . import _hopper_C\n") == expected


@pytest.mark.parametrize(
    "source",
    [
        """
        def use():
            major, minor = torch.cuda.get_device_capability()
            if major == 9:
                from . import _hopper_C
        """,
        """
        def use():
            properties = torch.cuda.get_device_properties(0)
            capability = properties.major * 10 + properties.minor
            if capability == 90:
                from . import _hopper_C
        """,
        """
        def use():
            match = "sm" + "".join(map(str, torch.cuda.get_device_capability()))
            if match == "sm90":
                from . import _hopper_C
        """,
        """
        HOPPER = (9, 0)
        def _check():
            if torch.cuda.get_device_capability() != HOPPER:
                raise RuntimeError("only on Hopper")
        def use():
            _check()
            from . import _hopper_C
        """,
        """
        import functools
        class Kernels:
            def __init__(self):
                self.hopper = torch.cuda.get_device_capability() == (9, 0)
            def run(self):
                if self.hopper:
                    self._load()
            def _load(self):
                from . import _hopper_C
        """,
        """
        def _name(backend):
            if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
                raise ValueError(backend)
            return "hopper" if torch.cuda.get_device_capability() == (9, 0) else "plain"
        class Kernels:
            def __init__(self, backend):
                self.backend = _name(backend)
                if self.backend == "hopper":
                    import pkg._hopper_C
        """,
        """
        def use():
            name = {(8, 0): "_ampere_C", (9, 0): "_hopper_C"}.get(torch.cuda.get_device_capability())
            if name:
                return importlib.import_module(f"pkg.{name}")
        """,
        """
        def use():
            for device in devices:
                if torch.cuda.get_device_capability(device)[0] != 9:
                    continue
                with context(device):
                    torch.ops.load_library(os.path.join(os.path.dirname(__file__), "_hopper_C.abi3.so"))
        """,
        """
        def use():
            return _hopper() if torch.cuda.get_device_capability()[0] == 9 else None
        def _hopper():
            return ctypes.CDLL(str(Path(__file__).parent / "_hopper_C.abi3.so"))
        """,
        """
        try:
            if torch.cuda.get_device_capability() != (9, 0):
                raise ImportError
            from . import _hopper_C
        except ImportError:
            _hopper_C = None
        """,
    ],
)
def test_ways_to_ask(source):
    assert used(source) == ["9.0"]


AVAILABLE = """
try:
    from . import _hopper_C
    AVAILABLE = True
except ImportError:
    AVAILABLE = False
"""


@pytest.mark.parametrize(
    "function",
    [
        """
        def is_supported():
            if not AVAILABLE:
                return False, "not built"
            if torch.cuda.get_device_capability()[0] != 9:
                return False, "only on Hopper"
            return True, None
        def run(x):
            return torch.ops._hopper_C.run(x)
        """,
        """
        def _available():
            return (AVAILABLE, None)
        def is_supported():
            built, why = _available()
            if not built:
                return False, why
            if not current_platform.is_device_capability_family(90):
                return False, "only on Hopper"
            return True, None
        """,
        """
        class Kernels:
            def __init__(self):
                self.hopper = is_cuda() and current_platform.is_device_capability_family(90)
            def why(self):
                if not self.hopper:
                    return "only on Hopper"
                elif not AVAILABLE:
                    return "not built"
        """,
        """
        def run(x):
            if torch.cuda.get_device_capability()[0] != 9:
                raise RuntimeError("only on Hopper")
            return _hopper_C.run(x)
        """,
        """
        def is_supported():
            return torch.version.cuda >= "12.3" and torch.cuda.get_device_capability()[0] == 9
        def run(x):
            if not is_supported():
                raise NotImplementedError
            return torch.ops.own.run(x)
        """,
    ],
)
def test_functions_tell_of_an_extension_that_is_imported_at_the_top(function):
    assert used(AVAILABLE + textwrap.dedent(function)) == ["9.0"]


@pytest.mark.parametrize("folder", ["sm90", "sm80"])
def test_folder_is_chosen_by_the_capability(folder):
    source = """
    def _load():
        capability = torch.cuda.get_device_capability()
        folder = "sm90" if capability == (9, 0) else "sm80"
        pattern = str(Path(__file__).parent / folder / "ops.*")
        spec = importlib.util.spec_from_file_location("ops", sorted(glob.glob(pattern))[0])
        return importlib.util.module_from_spec(spec)
    ops = _load()
    """
    expected = ["9.0"] if folder == "sm90" else [one for one in EVERY if one != "9.0"]
    assert used(source, f"pkg/{folder}/ops.so") == expected
    formatted = """
    def load():
        major, minor = torch.cuda.get_device_capability()
        path = os.path.join(os.path.dirname(__file__), f"sm{major}{minor}", "ops.so")
        torch.ops.load_library(path)
    """
    assert used(formatted, f"pkg/{folder}/ops.so") == [f"{folder[2]}.{folder[3]}"]


def test_function_of_another_module_answers():
    source = """
    from pkg.arch import is_hopper
    def use():
        if is_hopper():
            from . import _hopper_C
    """
    arch = "def is_hopper():\n    return torch.cuda.get_device_capability()[0] == 9\n"
    assert used(source, arch=arch) == ["9.0"]
    assert used(source, arch="def is_hopper():\n    return read_settings()\n") is None
    assert used(source) is None


LOADED = "def use():\n    from . import _hopper_C\n"
GUARDED = f"def use():\n    if {MAJOR} == 9:\n        from . import _hopper_C\n"


@pytest.mark.parametrize(
    "source",
    [
        LOADED,
        "from . import _hopper_C\n",
        f"def use():\n    if {MAJOR} == 9:\n        from . import _other_C\n    from . import _hopper_C\n",
        f"def use():\n    # if {MAJOR} == 9:\n    from . import _hopper_C\n",
        f"def use():\n    'if {MAJOR} == 9: raise'\n    from . import _hopper_C\n",
        f"def use():\n    from . import _hopper_C\n    if {MAJOR} != 9:\n        raise RuntimeError\n",
        f"from . import _hopper_C\nif {MAJOR} != 9:\n    raise ImportError\n",
        f"{LOADED}def other():\n    if {MAJOR} != 9:\n        raise RuntimeError\n",
        f"{GUARDED}def other():\n    from . import _hopper_C\n",
        f"def use():\n    if {MAJOR} == 9:\n        pass\n    from . import _hopper_C\n",
        f"""
def use():
    try:
        if {MAJOR} != 9:
            raise ValueError
    except ValueError:
        pass
    from . import _hopper_C
""",
        f"def use():\n    if {MAJOR} == 9:\n        return 'pkg._hopper_C'\n",
        f"{AVAILABLE}def tile():\n    return 256 if {MAJOR} == 9 else 128\n",
        f"{AVAILABLE}def has_bf16():\n    return {MAJOR} == 9\ndef run(x):\n    return _hopper_C.run(x)\n",
        f"{AVAILABLE}def run(x):\n    _hopper_C.run(x)\n    if {MAJOR} != 9:\n        raise RuntimeError\n",
    ],
)
def test_what_is_no_guard(source):
    assert used(source) is None


def uses_on_older_gpus(source, **others):
    """Whether an older GPU needs the file for all that is said, where another module uses it on 9.0 only."""
    found = used(source, guarded=GUARDED, **others)
    return found is None or "8.0" in found


@pytest.mark.parametrize(
    "source",
    [
        # Lists and dictionaries change after they were made.
        """
        def run(paths):
            found = []
            for path in paths:
                found.append(path)
            if found:
                from . import _hopper_C
        """,
        """
        def run(paths):
            seen = []
            seen.extend(paths)
            if not seen:
                return
            from . import _hopper_C
        """,
        """
        OPTIONS = {"fast": False}
        def configure(fast):
            OPTIONS["fast"] = fast
        def run():
            if OPTIONS["fast"] or OPTIONS.get("fast"):
                from . import _hopper_C
        """,
        f"""
        MAJORS = [9]
        def register(major):
            MAJORS.append(major)
        def run():
            if {MAJOR} in MAJORS:
                from . import _hopper_C
        """,
        f"""
        def run(majors=None):
            known = majors = [9]
            known += load()
            if {MAJOR} in majors:
                from . import _hopper_C
        """,
        f"""
        def run():
            majors = [9]
            load(majors)
            if {MAJOR} not in majors:
                return
            from . import _hopper_C
        """,
        # Loops go round more than once, and end in the middle.
        """
        def run(names):
            kind = None
            for name in names:
                if is_installed(name):
                    kind = name
                    break
            if kind is not None:
                from . import _hopper_C
        """,
        """
        def run(names):
            found = False
            for name in names:
                if is_installed(name):
                    found = True
                    continue
            if found:
                from . import _hopper_C
        """,
        """
        def run():
            tries = 0
            while tries < 3:
                tries += 1
            if tries == 3:
                from . import _hopper_C
        """,
        f"""
        def run(names):
            lowest = 9
            for name in names:
                if is_installed(name):
                    lowest = 8
                    break
            if {MAJOR} >= lowest:
                from . import _hopper_C
        """,
        f"""
        def run(names):
            lowest = 9
            for name in names:
                if {MAJOR} >= lowest:
                    from . import _hopper_C
                lowest = 8
        """,
        f"""
        def run(names):
            lowest = 9
            while lowest := find(names, lowest):
                if {MAJOR} == 9 and check():
                    break
            else:
                if {MAJOR} >= lowest:
                    from . import _hopper_C
        """,
        # Blocks end where something fails.
        f"""
        def run():
            lowest = 9
            try:
                if probe():
                    lowest = 8
                    raise RuntimeError
            except RuntimeError:
                pass
            if {MAJOR} >= lowest:
                from . import _hopper_C
        """,
        f"""
        def run():
            lowest = 9
            with contextlib.suppress(RuntimeError):
                lowest = 8
                probe()
                lowest = 9
            if {MAJOR} >= lowest:
                from . import _hopper_C
        """,
        f"""
        def run(mode):
            lowest = 9
            match mode:
                case [*_, 8 as lowest] if lowest:
                    pass
                case "old":
                    lowest = 8
                case {{"lowest": 8, **rest}}:
                    return rest
                case _:
                    pass
            if {MAJOR} >= lowest:
                from . import _hopper_C
        """,
        # Others bind names.
        f"""
        def run():
            lowest = 9
            def lower():
                nonlocal lowest
                lowest = 8
            visit(lower)
            if {MAJOR} >= lowest:
                from . import _hopper_C
        """,
        f"""
        LOWEST = 9
        def lower():
            global LOWEST
            LOWEST = 8
        lower()
        if {MAJOR} >= LOWEST:
            from . import _hopper_C
        """,
        f"""
        lowest = 9
        def run(lowest):
            def load():
                if {MAJOR} >= lowest:
                    from . import _hopper_C
            visit(load)
        """,
    ],
)
def test_what_else_is_known_of_a_name_hides_no_use(source):
    assert uses_on_older_gpus(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("MAJORS = [9]\ndef run():\n    if {MAJOR} in MAJORS:\n        from . import _hopper_C\n", ["9.0"]),
        (
            """
def run():
    known = False
    for device in devices:
        known = {MAJOR} == 9
        if known:
            break
    if known:
        from . import _hopper_C
""",
            ["9.0"],
        ),
        (
            """
def run():
    try:
        hopper = {MAJOR} == 9
    except RuntimeError:
        hopper = False
    if hopper:
        from . import _hopper_C
""",
            ["9.0"],
        ),
        (
            """
def run():
    if not torch.cuda.is_available() or TYPE_CHECKING:
        major = 9
    else:
        major = {MAJOR}
    while True:
        if major == 9:
            from . import _hopper_C
""",
            ["9.0"],
        ),
        (
            """
def run():
    lowest: int = max(8, 9)
    try:
        probe()
    except RuntimeError as error:
        lowest = int("9")
    if lowest == {MAJOR}:
        from . import _hopper_C
""",
            ["9.0"],
        ),
    ],
)
def test_constants_and_answers_are_followed(source, expected):
    assert used(source.replace("{MAJOR}", MAJOR)) == expected


@pytest.mark.parametrize(
    "source",
    [
        """
        class Backend:
            @property
            def generic(self):
                return self.settings.generic
            def run(self):
                if self.generic:
                    return None
                from . import _hopper_C
        """,
        f"""
        class Backend:
            @property
            def lowest(self):
                return self.settings.lowest
            def run(self):
                if {MAJOR} != self.lowest:
                    return None
                from . import _hopper_C
        """,
        f"""
        class Base:
            lowest = 9
            def run(self):
                if {MAJOR} >= self.lowest:
                    from . import _hopper_C
        class Middle(Base): pass
        class Derived(Middle):
            lowest = 8
        """,
        f"""
        class Base:
            def run(self):
                if self.fits():
                    from . import _hopper_C
            def fits(self):
                return {MAJOR} == 9
        class Derived(it.Base):
            def fits(self):
                return True
        """,
        f"""
        class Backend:
            lowest = 9
            def __init__(self, older):
                if older:
                    self.lowest = 8
            def run(self):
                if {MAJOR} >= self.lowest:
                    from . import _hopper_C
        """,
        f"""
        class Backend:
            def __init__(self, forced):
                self.hopper = True
                if not forced:
                    self.hopper = {MAJOR} == 9
            def run(self):
                if self.hopper:
                    from . import _hopper_C
        """,
    ],
)
def test_attributes_that_may_have_another_value_hide_no_use(source):
    assert uses_on_older_gpus(source)


def test_attributes_that_another_module_assigns_hide_no_use():
    source = f"""
    LOWEST = 9
    class Settings:
        lowest = 9
    def run():
        if {MAJOR} >= Settings.lowest or {MAJOR} >= LOWEST:
            from . import _hopper_C
    """
    assert not uses_on_older_gpus(source)
    assert uses_on_older_gpus(source, other="from pkg.it import Settings\nSettings.lowest = 8\n")
    assert uses_on_older_gpus(source, other="from pkg import it\nit.LOWEST = 8\n")


@pytest.mark.parametrize(
    ("decorator", "first", "call"),
    [
        ("staticmethod", "", "Platform.within(80, 90)"),
        ("staticmethod", "", "self.within(80, 90)"),
        ("classmethod", "cls, ", "Platform.within(80, 90)"),
        ("classmethod", "cls, ", "self.within(low=80, high=90)"),
        ("functools.cache", "self, ", "Platform.within(self, 80, 90)"),
        ("functools.cache", "self, ", "self.within(80, 90)"),
    ],
)
def test_arguments_of_methods_are_bound_as_python_does(decorator, first, call):
    source = f"""
    class Platform:
        @{decorator}
        def within({first}low, high):
            return low <= {MAJOR} * 10 + {CAPABILITY}[1] <= high
        def run(self):
            if {call}:
                from . import _hopper_C
    """
    assert used(source) == ["8.0", "8.6", "8.9", "9.0"]


@pytest.mark.parametrize("text", ["_hopper_C", "pkg._hopper_C", "._hopper_C", "kernels/_hopper_C.abi3.so"])
def test_module_that_names_a_file_and_loads_it_in_an_unknown_way_may_use_it(text):
    source = f"def run():\n    return functools.partial(find, {text!r})()\n"
    assert uses_on_older_gpus(source)
    assert not uses_on_older_gpus(source.replace(text, f"{text}::op"))


def test_question_with_keywords_states_the_capability():
    source = """
    def run():
        if platform.is_device_capability(device_id=0, capability=90):
            from . import _hopper_C
    """
    assert used(source) == ["9.0"]


@pytest.mark.parametrize(
    "source",
    [
        "from ctypes import CDLL as load\ndef run():\n    load(join(HERE, '_hopper_C.abi3.so'))\n",
        "def run():\n    load = ctypes.CDLL\n    load('pkg/_hopper_C.abi3.so')\n",
        "load = CDLL\ndef run():\n    load('pkg/_hopper_C.abi3.so')\n",
        "def run():\n    importlib.import_module(package='pkg', name='._hopper_C')\n",
        "def run():\n    importlib.import_module(*('._hopper_C', 'pkg'))\n",
        "def run(module=importlib.import_module('pkg._hopper_C')):\n    module.run()\n",
        "run = lambda module=importlib.import_module('pkg._hopper_C'): module.run()\n",
        "class Kernels(importlib.import_module('pkg._hopper_C').Kernels): pass\n",
        "@importlib.import_module('pkg._hopper_C').register\nclass Kernels: pass\n",
        "class Kernels(metaclass=importlib.import_module('pkg._hopper_C').Kind): pass\n",
        "def run():\n    return [n for n in names if importlib.import_module('pkg._hopper_C')]\n",
    ],
)
def test_ways_to_load(source):
    assert uses_on_older_gpus(source)


def test_question_in_another_module_is_no_guard():
    assert used(LOADED, other=GUARDED.replace("_hopper_C", "_other_C")) is None
    assert used(LOADED, other=GUARDED) is None
    assert used("from . import _hopper_C\n", other=f"if {MAJOR} == 9:\n    from . import it\n") is None


def test_module_that_only_guarded_modules_import_asks_nothing_itself():
    guarded = (
        AVAILABLE
        + f"""
def is_supported():
    return AVAILABLE and {MAJOR} == 9
if AVAILABLE:
    from pkg.it import run
"""
    )
    carrier = "import pkg._hopper_C\ndef run(x):\n    return torch.ops._hopper_C.run(x)\n"
    assert used(carrier, interface=guarded) == ["9.0"]
    assert used(carrier, interface=guarded, third="import pkg.it\n") is None


def test_first_question_is_named():
    guard = told({"it.py": GUARDED})
    assert guard.line == ("pkg/it.py", 2)
    source = f"import torch\n{AVAILABLE}\ndef is_supported():\n    return AVAILABLE and {MAJOR} == 9\n"
    assert told({"it.py": source}).line == ("pkg/it.py", source[: source.index(CAPABILITY)].count("\n") + 1)


@pytest.mark.parametrize("condition", [f"{CAPABILITY} >= lowest()", f"{MAJOR} == 9 or forced"])
def test_question_that_cannot_be_evaluated_is_named_and_guards_nothing(condition):
    source = f"def use():\n    if {condition}:\n        from . import _hopper_C\n"
    guard = told({"it.py": source})
    assert (guard.line, guard.used) == (("pkg/it.py", 2), frozenset(EVERY))


def test_file_that_nothing_names_has_no_guard():
    assert told({"it.py": GUARDED}, "pkg/_other_C.abi3.so") is None
    assert find_guards({}, FILES, EVERY, StepBudget(STEPS)) == {}


HOSTILE = [
    "(" * 10_000,
    "-" * 50_000 + "1",
    "x = " + "1+" * 50_000 + "1",
    "x" + ".a" * 50_000,
    "x = " + "[" * 150 + "]" * 150,
    "if a:\n" + "".join(" " * n + "if a:\n" for n in range(1, 90)) + " " * 90 + "pass",
    "x = '_hopper_C' * 10 ** 10 ** 10",
    "x = 1\n" + "x = x + x\n" * 5_000,
    "x = 'a'\n" + "x = x + x\n" * 5_000,
    "x = (1,)\n" + "x = (x, x)\n" * 200,
    "def f(x):\n    return f(f(f(f(x))))\nf(f)",
    "def f(g):\n    return g(f)\n" * 50 + "f(f)",
    "".join(f"def f{n}():\n    f{n + 1}(); f{n + 1}(); f{n + 1}()\n" for n in range(40)) + "f0()",
    "while True:\n    pass",
    "class A(A):\n    a = A.a\n    def __init__(self): self.a = A()",
    "from . import it\nfrom .it import *\nfrom ....... import x",
    "lambda: (yield)",
    "match x:\n    case {'a': [*_, A(b=c)], **d}: pass",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    "a = 1\0",
    "\N{BYTE ORDER MARK}x = 1",
    "x = {}[" + "{}[" * 100 + "1" + "]" * 100 + "]",
    "import importlib\n" + "importlib.import_module('*' * 3)\n" * 20,
    "s = 'a' * 16\n" + "s = s.join((s, s, s, s, s, s, s, s))\n" * 9,
    "s = 'aaaaaaaaaaaaaaaa'\n" + "s = s.join((s, s, s, s, s, s, s, s))\n" * 9,
    f"x = f'{{{0xF << 20_000:#x}}}'",
    f"x = 'a' + {0xF << 20_000:#x}",
    f"x = int({'9' * 500!r})\ny = str(x * x)\n",
    f"x = tuple({'9' * 500!r})\ny = '-'.join(x)\n",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_sources_end_and_guard_nothing(text):
    """A module that cannot be read, or takes too many steps, may load whatever it names."""
    named = f"from . import _hopper_C\nCAP = {CAPABILITY}\n{text}\n"
    assert used(named, other=GUARDED) is None
    assert told({"it.py": text, "other.py": GUARDED}) is not None or "_hopper_C" in text


@pytest.mark.parametrize("step", ["collect_bound", "answer_query", "loads_file"])
def test_module_whose_reading_fails_may_load_whatever_it_names(monkeypatch, step):
    def fail(*_):
        raise KeyError(step)

    places = {"collect_bound": modules, "answer_query": capability_queries, "loads_file": module_reading}
    assert used(GUARDED) == ["9.0"]
    monkeypatch.setattr(places[step], step, fail)
    assert used(f"class Kernels(Base):\n    pass\n{GUARDED}") is None


def test_importer_that_cannot_be_read_may_use_what_a_module_carries():
    guarded = f"{AVAILABLE}def is_supported():\n    return AVAILABLE and {MAJOR} == 9\nimport pkg.it\n"
    carrier = "import pkg._hopper_C\ndef run(x):\n    return torch.ops._hopper_C.run(x)\n"
    assert used(carrier, interface=guarded) == ["9.0"]
    assert used(carrier, interface=guarded, third="from .it import run\n(") is None


def test_every_text_that_parts_may_be_joined_to_is_loaded():
    source = """
    def load(fast):
        parts = ("pkg", "_hopper_C") if fast else ("pkg", "_other_C")
        return importlib.import_module(".".join(parts))
    """
    assert uses_on_older_gpus(source)
    other = {"it.py": source, "other.py": GUARDED.replace("_hopper_C", "_other_C")}
    assert told(other, "pkg/_other_C.abi3.so") is None


def test_modules_of_a_package_have_a_limited_number_of_parts(monkeypatch):
    monkeypatch.setattr(guards, "MOST_PARTS", 200)
    assert used(GUARDED) == ["9.0"]
    assert used(GUARDED, other="x;" * 100) == ["9.0"]
    assert used("x;" * 50 + GUARDED) is None


def test_work_grows_with_the_functions_of_a_package():
    def count(number):
        calls = "".join(f"def _f{n}():_hopper_C\n" for n in range(number))
        source = (
            f"from pkg import _hopper_C\n{calls}def go():\n    {'; '.join(f'_f{n}' for n in range(number))}\n"
        )
        sources = {"pkg/it.py": source.encode(), "pkg/a.py": b"x\n" * 500}
        find = partial(find_guards, sources, FILES, ["8.0", "9.0"], StepBudget(STEPS))
        return counted(find, PACKAGE).total()

    assert count(400) < 4.4 * count(100)


class CountingBudget(StepBudget):
    """A budget that knows what was spent."""

    spent = 0

    def spend(self, steps):
        self.spent += steps
        return super().spend(steps)


def test_each_file_that_is_looked_up_takes_steps():
    load = GUARDED.replace("from . import _hopper_C", "import_module('pkg._hopper_C')")
    source = {"pkg/it.py": f"{load}{'import a; ' * 20}{[*map(str, range(500))]}\n".encode()}
    files = [HOPPER, *(f"pkg/A{n}.so" for n in range(500))]
    one, all_files = CountingBudget(STEPS), CountingBudget(STEPS)
    assert find_guards(source, [HOPPER], EVERY, one) == find_guards(source, files, EVERY, all_files) != {}
    assert all_files.spent > one.spent + 10_000
    assert find_guards(source, files, EVERY, StepBudget(all_files.spent)) != {}
    assert find_guards(source, files, EVERY, StepBudget(all_files.spent - 1)) == {}


def test_steps_are_limited_for_all_packages_together():
    assert find_guards({"pkg/it.py": GUARDED.encode()}, FILES, EVERY, StepBudget(10)) == {}
