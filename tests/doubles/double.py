"""The base of doubles: mypy accepts one for whatever it stands for."""

from typing import Any


class Double(Any):
    def __new__(cls, *_arguments, **_named):
        return object.__new__(cls)  # Any's own, in Python 3.11, would pass the arguments on
