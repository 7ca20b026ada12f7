"""A real browser, without a window."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--virtual-time-budget=2000",
]


def run(html: str, *flags: str) -> str:
    """Open a page and return what the browser prints."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "These tests need Chromium: apt-get install chromium"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(html if html.startswith("<!") else f"<!doctype html>{html}", "utf-8")
        command = [browser, *_FLAGS, f"--user-data-dir={folder}/profile", *flags, str(page)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def dumped(html: str, *flags: str) -> str:
    """Return the document of a page after its scripts ran."""
    return run(html, "--dump-dom", *flags)
