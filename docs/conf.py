"""The site: `make docs`."""

import sys
from importlib.metadata import version as installed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "imagematrix"
author = "the imagematrix authors"
release = version = installed("imagematrix")

extensions = ["myst_parser", "imagematrix_docs"]
exclude_patterns = ["_ext", "_build"]
suppress_warnings = ["misc.highlighting_failure"]  # templates are Dockerfiles with Jinja2 in them

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

smartquotes = False  # they would turn the two dashes of an option into one

html_theme = "furo"
html_title = f"imagematrix {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
