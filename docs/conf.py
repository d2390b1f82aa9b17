"""How `make docs` builds the site: Sphinx over the repository as it lies, without running a notebook or asking a network.

The source folder is the repository's root, so that links between pages are those that work on GitHub too. What only a site needs
is put in while a page is read: the table of contents into the README, the docstrings into ``docs/api.md``.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields, is_dataclass
from functools import reduce
from html import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.ext.napoleon import Config, GoogleDocstring

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import hfsdk  # noqa: E402 - the one of this checkout
import hfsdk.models  # noqa: E402

project = "hfsdk"
version = release = hfsdk.__version__
copyright = "the authors of hfsdk, Apache-2.0"

extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/decisions/*.md", "notebooks/*.ipynb", "benchmarks/README.md"]
exclude_patterns = ["out", ".venv*", ".hypothesis", "**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = "hfsdk"
html_static_path = ["site"]
html_js_files = ["theme.js"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "tango"

nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "text"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"
autodoc_preserve_defaults = True
add_module_names = False
default_role = "py:obj"

CONTENTS = {
    "Learn": ["docs/glossary", "notebooks/*", "docs/looking", "docs/gallery"],
    "Use": [
        *[
            "docs/recipes",
            "docs/algorithms",
            "docs/lora",
            "docs/where-it-runs",
            "docs/clusters",
            "docs/kept-sessions",
            "docs/beside",
            "docs/what-you-bring",
            "docs/explain",
            "docs/gpu",
            "docs/reliability",
            "docs/why",
        ],
        "SECURITY",
    ],
    "Look up": ["docs/api", "docs/methods", "docs/checklist", "docs/resharding", "docs/perf-model", "benchmarks/README"],
    "Work on it": ["CONTRIBUTING", "docs/design-notes", "docs/decisions/README", "CHANGELOG"],
}
"""The side bar: caption -> pages, in this order."""

SECTIONS = Config(napoleon_use_ivar=True, napoleon_custom_sections=[("Options", "params_style"), ("Fields", "params_style")])
"""How sections of docstrings are read, those with a line for each field of a dataclass too."""

_PICTURE = re.compile(r'<picture>\n.*srcset="(?P<dark>.+)">\n.*alt="(?P<alt>.+)" src="(?P<light>.+)">\n</picture>')
"""A picture in two themes, as GitHub shows it by the reader's system; the site has a theme of its own."""
_API_NAME = re.compile(r"^- `hf\.([\w.]+)`$", re.MULTILINE)


def contents() -> str:
    """Return the side bar's tables of contents, as MyST."""
    return "".join(toctree(names, caption) for caption, names in CONTENTS.items())


def toctree(names: list[str], caption: str = "") -> str:
    """Return a table of contents that is shown in the side bar alone, as MyST."""
    options = [":hidden:", ":glob:", *[f":caption: {caption}"] * bool(caption)]
    return "\n".join(["\n", "```{toctree}", *options, "", *names, "```", ""])


def directive(found: re.Match[str]) -> str:
    """Return what documents a public name by its docstring, as MyST."""
    name = f"hfsdk.{found[1]}"
    value = reduce(getattr, found[1].split("."), hfsdk)
    if isinstance(value, type):
        kind = "autoexception" if issubclass(value, Exception) else "autoclass"
    elif isinstance(value, ModuleType):
        kind, name = "automodule", value.__name__
    else:
        kind = "autofunction"
    text = value.__doc__ or ""
    told = [f.name for f in fields(value) if re.search(rf"^ +{f.name}: ", text, re.MULTILINE)] if is_dataclass(value) else []
    without = f"   :exclude-members: {', '.join(told)}\n" if told else ""  # they stand in the class's own text
    return f"```{{eval-rst}}\n.. {kind}:: {name}\n{without}```"


def in_both_themes(found: re.Match[str]) -> str:
    """Return a picture's two images, each for the theme of the site that it is drawn for, as MyST."""
    images = ((found["light"], "only-light"), (found["dark"], "only-dark"))
    return "\n".join(f"```{{image}} {file}\n:alt: {found['alt']}\n:class: {theme}\n```" for file, theme in images)


def on_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn a docstring in Google's style into reStructuredText; that of a field is one sentence, without sections."""
    if what != "attribute":
        lines[:] = GoogleDocstring(lines, SECTIONS, app, what, name, obj, options).lines()


def on_signature(app: Sphinx, what: str, name: str, obj: type, *rest: object) -> tuple[str, str] | None:
    """Show the options of a dataclass with their defaults, also where its ``__new__`` takes any to say what is wrong with one."""
    if what != "class" or not is_dataclass(obj):
        return None
    _, *taken = inspect.signature(obj.__init__).parameters.values()
    shown = [parameter.replace(annotation=parameter.empty) for parameter in taken]
    return re.sub(r"<[\w. ]+>", "...", str(inspect.Signature(shown))), ""


def on_source_read(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to a page what only the site has."""
    if page == root_doc:
        source[0] = _PICTURE.sub(in_both_themes, source[0]) + contents()
    elif page == "docs/decisions/README":
        source[0] += toctree(["20*"])
    elif page == "docs/api":
        source[0] = _API_NAME.sub(directive, source[0])


def on_build_finished(app: Sphinx, error: Exception | None) -> None:
    """Let the site open at the README."""
    if error is None and app.builder.format == "html":
        page = '<!doctype html><meta charset="utf-8"><title>hfsdk</title><meta http-equiv="refresh" content="0; url=README.html">'
        (Path(app.outdir) / "index.html").write_text(page + '<a href="README.html">hfsdk</a>\n', encoding="utf-8")


def math(translator: HTML5Translator, node: nodes.math) -> None:
    """Write a formula as it is: those of the notebooks read well so, and MathJax would be asked of a network."""
    translator.body.append(f'<i class="math">{escape(node.astext())}</i>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.add_html_math_renderer("text", (math, None), (math, None))
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("autodoc-process-signature", on_signature)
    app.connect("source-read", on_source_read)
    app.connect("build-finished", on_build_finished)
