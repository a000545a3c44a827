"""Names in the package: a class name means one thing."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "imagematrix"


def test_each_class_has_a_name_of_its_own():
    """A reader who searches for a class finds one. An underscore makes no other name."""
    modules = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules[node.name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    assert len(modules) > 200
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
