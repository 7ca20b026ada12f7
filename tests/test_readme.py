"""Every block of code in the README and in the pages runs, in order, one session for each page."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dcp_zarr
from dcp_zarr.cli import app

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if BLOCK.search(p.read_text()))


def test_the_readmes_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    torch.manual_seed(0)
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_examples_run_and_print_what_it_says(page):
    names: dict = {}
    printed = ""
    for language, block in BLOCK.findall((DOCS / page).read_text()):
        if language == "text":
            assert without_stored_size(printed) == without_stored_size(block)
        elif language == "sh":
            printed = "".join(map(run_command, block.splitlines()))
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, page, "exec"), names)
            printed = out.getvalue()


def without_stored_size(text):
    """Leave out what depends on random values."""
    return re.sub(r"\([^()]* stored\)", "", text)


def run_command(line):
    program, *arguments = shlex.split(line)
    assert program == "dcp-zarr"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (1 if arguments[0] == "diff" else 0), result.output
    return result.stdout


def test_the_reference_has_every_public_name_once():
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)", pages, re.MULTILINE)
    assert sorted(documented) == dcp_zarr.__all__


@pytest.mark.parametrize("page", ["faq.md", "viewers.md"])
def test_what_a_page_says_is_tested_is_a_test(page):
    named = set(re.findall(r"\btest_\w+", (DOCS / page).read_text()))
    there = "".join(path.read_text() for path in (REPOSITORY / "tests").glob("test_*.py"))
    there += " ".join(f"{path.stem}(" for path in (REPOSITORY / "tests").glob("test_*.py"))
    assert named
    assert {name for name in named if f"{name}(" not in there} == set()
