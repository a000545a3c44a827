"""Read the key `warm_up` of an image in a matrix.yaml: a command, what it gets, and what it may take."""

from __future__ import annotations

from imagematrix.build.matrix.document import NodeReader
from imagematrix.common.suggestions import require_known
from imagematrix.common.units import parse_duration, parse_size
from imagematrix.errors import UsageError
from imagematrix.images.catalog import warm_up
from imagematrix.images.catalog.warm_up import MATCHES, NETWORKS, WarmUp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.build.matrix.document import Node
    from imagematrix.build.matrix.problems import Mark

KEYS = ("command", "gpus", "timeout", "environment", "inputs", "network", "max_size", "match")


class WarmUpReader(NodeReader):
    """Reads the warm-up of an image."""

    def read_warm_up(self, node: Node | None) -> WarmUp | None:
        """Return the warm-up in `node`, or None if there is none."""
        if node is None:
            return None
        fields = self._read_map(node, "warm_up", keys=KEYS)
        command = self._require_field(node, fields, "command", "command: [train, --warm-up]")
        words = self._read_command(command, "command") if command else ()
        if command:
            self._check(command.mark, warm_up.check_command, words)
        usual = WarmUp(command=words)

        def read(key: str, default: str, check: Callable[[str], None]) -> str:
            text = self._read_text(fields.get(key), key)
            if text is None:
                return default
            self._check(fields[key].mark, check, text)
            return text

        timeout = read("timeout", "", lambda text: warm_up.check_timeout(parse_duration(text), text))
        size = read("max_size", "", lambda text: warm_up.check_size(parse_size(text), text))
        return WarmUp(
            command=words,
            gpus=read("gpus", usual.gpus, warm_up.check_gpus),
            timeout_s=parse_duration(timeout) or usual.timeout_s,
            environment=self._read_environment(fields.get("environment")),
            inputs=self._read_inputs(fields.get("inputs")),
            network=read("network", usual.network, lambda text: require_known(text, NETWORKS, "network")),
            max_size=int(parse_size(size) or usual.max_size),
            match=read("match", usual.match, lambda text: require_known(text, MATCHES, "match")),
        )

    def _read_environment(self, node: Node | None) -> tuple[tuple[str, str], ...]:
        variables = {}
        for name, mark, value in self._read_entries(node, "environment"):
            text = self._read_text(value, name)
            if text is not None:
                self._check(mark, warm_up.check_variable, name, text)
                variables[name] = text
        if node:
            self._check(node.mark, warm_up.check_number, variables, warm_up.VARIABLES, "variables")
        return tuple(sorted(variables.items()))

    def _read_inputs(self, node: Node | None) -> tuple[tuple[str, str], ...]:
        inputs: dict[str, str] = {}
        for name, mark, value in self._read_entries(node, "inputs"):
            path = self._read_text(value, name)
            if path is not None:
                self._check(mark, warm_up.check_input, name, path, inputs.items())
                inputs[name] = path
        if node:
            self._check(node.mark, warm_up.check_number, inputs, warm_up.INPUTS, "inputs")
        return tuple(sorted(inputs.items()))

    def _check(self, mark: Mark, check: Callable[..., None], *values: object) -> None:
        """Add the error that a check of values raises, if any, as one at a place of the file."""
        try:
            check(*values)
        except UsageError as error:
            self._add_problem(str(error), mark, error.remedy)
