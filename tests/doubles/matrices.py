"""Changes of the matrix that the fixture `project` writes: pairs of its text and what replaces it."""


def add_option(line: str) -> tuple[str, str]:
    """Give the image one more option."""
    return "context: .", f"context: .\n    {line}"


def add_key(line: str) -> tuple[str, str]:
    """Give the matrix one more key."""
    return "axes:", f"{line}\naxes:"


def add_axis(line: str) -> tuple[str, str]:
    """Put an axis before the last."""
    return "  march:", f"  {line}\n  march:"


def add_properties(line: str) -> tuple[str, str]:
    """Give properties to the values of one more axis."""
    return "properties:\n", f"properties:\n  {line}\n"


def add_include(*entries: str) -> tuple[str, str]:
    """Include cells, or properties of cells."""
    return "exclude:\n", "".join(["include:\n", *(f"  - {entry}\n" for entry in entries), "exclude:\n"])


def add_facts(text: str) -> tuple[str, str]:
    """State facts before the properties."""
    return "properties:\n", f"{text}properties:\n"
