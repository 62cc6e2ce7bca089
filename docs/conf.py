"""The site: ``sphinx-build -W -n -c docs . docs/_build/html``, of the extra ``docs``. Its pages need no server and no network.

Sources are the repository's own documents, where they lie: a link from one to another is right in a checkout and on the site.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fastexchange import __version__  # noqa: E402
from fastexchange.__main__ import main  # noqa: E402

project = "fastexchange"
author = "the authors of fastexchange"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "*.md",
    "examples/**.md",
    "kernels/**.md",
    "notebooks/*.md",
    "notebooks/*.ipynb",
    "perf/README.md",
    "perf/results/*.md",
]
exclude_patterns = ["docs/_build", "**/.ipynb_checkpoints", ".gpu", ".venv*"]
nb_execution_mode = "off"  # tests run the notebooks, and keep what they print
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_typehints = "none"  # docstrings say what they mean

html_theme = "furo"
html_title = f"fastexchange {__version__}"
html_static_path = html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = html_show_copyright = False
html_extra_path = ["index.html"]  # a server shows it first: it leads to docs/


def set_sections(app, what, name, obj, options, lines: list[str]) -> None:
    """Set the docstrings' headings, links to pages, and ``name : description``, which NumPy's style would take for a type."""
    text = re.sub(r"^(\w[\w ]*)\n-+$", r".. rubric:: \1\n", "\n".join(lines), flags=re.M)
    text = re.sub(r"``(docs/[\w/-]+)\.md``", r":doc:`/\1`", text)
    lines[:] = re.sub(r"^([*\w]+(?:, [*\w]+)*) : (?=\S)", r"``\1``\n    ", text, flags=re.M).split("\n")


def hide_constructors(app, what, name, obj, options, signature, returned):
    """Show the parameters of classes that users call: those are the tuples."""
    return ("", None) if what in ("class", "exception") and not (issubclass(obj, tuple) and "DL" in name) else None


class CommandHelp(Directive):
    """What ``python -m fastexchange COMMAND --help`` prints."""

    optional_arguments = 1

    def run(self) -> list:
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
            main([*self.arguments, "--help"])
        return [nodes.literal_block(said.getvalue(), said.getvalue(), language="text")]


def setup(app) -> None:
    os.environ["COLUMNS"] = "100"  # of argparse's lines
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", set_sections)
    app.connect("autodoc-process-signature", hide_constructors)
