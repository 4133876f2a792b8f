"""The site by Sphinx: the pages of this folder, a page for each public name, and pages of files that they link to.

The last two are written here before Sphinx reads: `names/` from `orchdata.__all__`, and `repository/` from the links
that lead out of this folder, as in `../examples/ddp.py`. The Markdown stays as it is: its links work in both places.
"""

from __future__ import annotations

import gc
import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import orchdata

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent

project = "orchdata"
author = "the orchdata authors"
version = release = orchdata.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"orchdata {version}"
html_show_sourcelink = False
html_show_copyright = False
maximum_signature_line_length = 100

# Anchors are those of the repository's own pages.
myst_heading_anchors = 4

# Docstrings are Google's style, with `code` in single quotes as in Markdown.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Returns", "params_style"), ("Config", "params_style")]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_mock_imports = ["torchtitan", "tyro"]  # need another torch than the one of constraints.txt
toc_object_entries_show_parents = "hide"

# Names in signatures that have no page: those of Python, of other packages, and of this one that are not public.
nitpick_ignore_regex = [("py:.*", r"(?!orchdata\.\w+$).*")]

MODULES = ("balancers", "hf", "planners", "torchtitan")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?![a-z]+:|#|/)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def setup(app: Sphinx) -> dict[str, bool]:
    gc.disable()  # pages are trees of many small objects: half of the time of a build was looking for garbage
    app.connect("builder-inited", _write_pages)
    app.connect("source-read", _lead_out)
    app.connect("missing-reference", _find_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _lead_out(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn the links of a page that leave this folder to the pages of `repository/`."""
    if "/" not in docname:
        source[0] = _with_pages(source[0], "docs")


def _find_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Resolve `orchdata.dataset.mixture.Mixture` of a signature as `orchdata.Mixture`, where that is a public name."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in orchdata.__all__:
        return None
    target = f"orchdata.{name}"
    return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], target, node, content
    )


# --- pages of files of the repository -------------------------------------------------------------------------------


def _linked(text: str, folder: str) -> Iterator[str]:
    """Paths in the repository that a page links to and that are no page of this folder; the page is in `folder`."""
    for link in LINK.finditer(text):
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        if not link["image"] and posixpath.dirname(path) != "docs" and (REPOSITORY / path).exists():
            yield path


def _with_pages(text: str, folder: str) -> str:
    """The text with its links to files of the repository as links to pages of the site; images stay where they are."""

    def led(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        if not (REPOSITORY / path).exists():
            return link[0]
        if link["image"]:
            target = posixpath.relpath(path, "docs")
        elif posixpath.dirname(path) == "docs":
            target = posixpath.basename(path)
        else:
            target = _page(path)
        return f"{link['image']}[{link['text']}](/{target}{link['anchor'] or ''})"

    return LINK.sub(led, text)


def _page(path: str) -> str:
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _file_page(path: str) -> str:
    """A page that shows a file, or lists the files of a folder."""
    file = REPOSITORY / path
    if file.is_dir():
        text = f"# {path}\n\n" + "".join(f"- [{each.name}]({path}/{each.name})\n" for each in sorted(file.glob("*.py")))
    elif path.endswith(".md"):
        text = file.read_text()
    else:
        text = f"# {path}\n\n```{{literalinclude}} /../{path}\n```\n"
    return text


def _repository_pages() -> dict[str, str]:
    """Page -> text, of all files that pages link to, and that those link to in turn."""
    pages: dict[str, str] = {}
    due = [path for file in sorted(DOCS.glob("*.md")) for path in _linked(file.read_text(), "docs")]
    while due:
        path = due.pop()
        if _page(path) in pages:
            continue
        text, folder = _file_page(path), posixpath.dirname(path)
        pages[_page(path)] = f"---\norphan: true\n---\n\n{_with_pages(text, folder)}"
        due += _linked(text, folder)
    return pages


# --- pages of names -------------------------------------------------------------------------------------------------


def _name_page(name: str) -> str:
    """A page with the docstrings of one public name; of a module, with those of its own public names.

    A class is known by its capital: to import them all takes longer than to look whether a page is new.
    """
    names = [name]
    if name in MODULES:  # those that have a page of their own are not repeated
        module = import_module(f"orchdata.{name}")
        names = [f"{name}.{each}" for each in module.__all__ if each not in orchdata.__all__]
    directives = [".. py:currentmodule:: orchdata\n"]
    for each in names:
        is_class = each.rpartition(".")[2][0].isupper()
        directives.append(f".. auto{'class' if is_class else 'function'}:: orchdata.{each}\n")
    return f"# od.{name}\n\n```{{eval-rst}}\n" + "\n".join(directives) + "```\n"


def _name_pages() -> dict[str, str]:
    pages = {f"names/{name}.md": _name_page(name) for name in orchdata.__all__}
    names = "\n".join(orchdata.__all__)
    pages["names/index.md"] = (
        "# Public names\n\nA page for each name of `import orchdata as od`, from its docstring. "
        f"[API](/api.md) says what each is for.\n\n```{{toctree}}\n{names}\n```\n"
    )
    return pages


def _write_pages(app: Sphinx) -> None:
    """Write both kinds of pages, where their text changed: Sphinx reads only what is newer than its last reading."""
    pages = _name_pages() | _repository_pages()
    for folder in ("names", "repository"):
        for old in (DOCS / folder).rglob("*.md"):
            if old.relative_to(DOCS).as_posix() not in pages:
                old.unlink()
    for page, text in pages.items():
        file = DOCS / page
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
