"""Fixtures for the tests of rendering."""

import pytest


@pytest.fixture(autouse=True)
def _fast_renderers():
    """Start each process that renders as commands do."""
