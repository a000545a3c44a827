"""The pages whose commands need a Docker engine: in an empty folder, they print what the page shows."""

import shutil

import pages
import pytest

pytestmark = pytest.mark.long

PAGES = [
    pytest.param(path, id=str(path.relative_to(pages.ROOT)))
    for path in pages.PAGES
    if any(pages.steps(path.read_text(), "engine"))
]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(page, engine, tmp_path):
    hosts = tmp_path / "second"
    hosts.mkdir()
    for name in ("icelake-l40s.json", "genoa-h200.json"):
        shutil.copy(pages.ROOT / "tests" / "hosts" / name, hosts)
    environment = pages.environment(**engine.environment)
    different = pages.follow(page.read_text(), tmp_path, environment, "engine", engine.inside)
    assert not different, "\n\n".join(different)
