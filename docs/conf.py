"""How Sphinx builds these pages; ``scripts/check`` does, without network."""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING

import typer.cli
from typer.main import get_command

import dcp_zarr.cli

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "dcp_zarr"
version = release = installed_version("dcp_zarr")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

smartquotes_action = "D"  # dashes; quotes stay as they are typed
default_role = "py:obj"  # what docstrings put between single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
napoleon_google_docstring = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"dcp_zarr {release}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}


def _command_line(app: Sphinx, docname: str, source: list[str]) -> None:
    """Have the page of the command line say what ``--help`` does."""
    if docname == "cli":
        command = get_command(dcp_zarr.cli.app)
        context = typer.Context(command, info_name="dcp-zarr")
        text = typer.cli.get_docs_for_click(
            obj=command, ctx=context, name="dcp-zarr", title="Command line"
        )
        source[0] = re.sub("^Example: (.*)$", r"```sh\n\1\n```", text, flags=re.MULTILINE)


def _signature(
    app: Sphinx,
    what: str,
    name: str,
    documented: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Leave out how a class is made where its docstring tells of no parameters: we make those."""
    ours = what in ("class", "exception") and "Parameters\n" not in (documented.__doc__ or "")
    return ("", "") if ours else (signature, returned)


def setup(app: Sphinx) -> None:
    """Tell Sphinx of what stands here."""
    app.connect("autodoc-process-signature", _signature)
    app.connect("source-read", _command_line)
