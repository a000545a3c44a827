"""All files of the chart."""

from __future__ import annotations

import json
from importlib.metadata import version

from imagematrix.integrations.kubernetes.install.chart.templates import templates
from imagematrix.integrations.kubernetes.install.chart.values import defaults, schema

__all__ = ["files"]

CHART = """\
apiVersion: v2
name: imagematrix
description: Gives pods the image variant of the nodes that they run on, by a webhook, and labels the nodes.
type: application
version: {version}
appVersion: "{version}"
kubeVersion: ">=1.21.0-0"
"""
NOTES = """\
The webhook gives pods that use one of these versions the image for their nodes:
{{- range $.Values.images }}
  {{ . }}
{{- end }}

  kubectl rollout status -n {{ $.Release.Namespace }} deployment/imagematrix-webhook
"""


def files() -> dict[str, str]:
    """Return the text of each file by its path in the chart's folder."""
    return {
        "Chart.yaml": CHART.format(version=version("imagematrix")),
        "values.yaml": defaults(),
        "values.schema.json": json.dumps(schema(), indent=2) + "\n",
        **{f"templates/{name}": text for name, text in templates().items()},
        "templates/NOTES.txt": NOTES,
    }
