"""The base of test doubles, which mypy accepts in place of any type, and responses for those of docker-py."""

import io
import json
from typing import Any

import requests


class Double(Any):
    def __new__(cls, *_arguments, **_named):
        return object.__new__(cls)


def response(content):
    """An engine's response with this JSON; without one, that there is no such thing."""
    made = requests.Response()
    made.status_code = 404 if content is None else 200
    made.raw = io.BytesIO(json.dumps({"message": "no such thing"} if content is None else content).encode())
    return made
