"""All files of the chart."""

from __future__ import annotations

import json
from importlib.metadata import version

from imagematrix.integrations.kubernetes.install.chart.templates import render_templates
from imagematrix.integrations.kubernetes.install.chart.values import make_schema, render_defaults

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


def make_chart_files() -> dict[str, str]:
    """Return the text of each file by its path in the chart's folder."""
    return {
        "Chart.yaml": CHART.format(version=version("imagematrix")),
        "values.yaml": render_defaults(),
        "values.schema.json": json.dumps(make_schema(), indent=2) + "\n",
        **{f"templates/{name}": text for name, text in render_templates().items()},
        "templates/NOTES.txt": NOTES,
    }
