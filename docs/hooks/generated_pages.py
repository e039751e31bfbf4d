"""MkDocs hooks: pages that are written from the code when the site is built, and pictures drawn without a browser.

The reference of keys and that of commands are generated here rather than kept in the tree, so that they cannot be old.
Pictures stand in the pages as Mermaid, which GitHub draws; the site must work without a network, and Mermaid's
program would be loaded from one, so :mod:`schedule_pictures` draws them as SVG.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from commands_page import commands_as_markdown
from schedule_pictures import flowchart_as_svg

from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.main import app
from erase_rec.config.reference_page import configuration_as_markdown

_ROLE = re.compile(r":(?:class|meth|mod|func|data|attr|exc):(?=<code>)")
"""What docstrings put before a name, for other tools."""
_MERMAID = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for name, text in (
        ("reference/configuration.md", configuration_as_markdown(ContentCatalog())),
        ("reference/commands.md", commands_as_markdown(app)),
    ):
        files.append(File.generated(config, name, content=text))
    _complete(config, [file.src_uri for file in files.documentation_pages()])
    return files


def _complete(config: MkDocsConfig, pages: list[str]) -> None:
    """Adds the pages that ``nav`` of mkdocs.yml does not name: measurements to ``Results``, others at the end."""
    nav: list[Any] = list(config.nav or [])
    left = sorted(set(pages) - set(_named(nav)))
    results = [page for page in left if page.startswith("results/")]
    next(item for item in nav if "Results" in item)["Results"] += results
    if others := [page for page in left if page not in results]:
        nav.append({"More": others})
    config.nav = nav


def _named(nav: Any) -> Iterator[str]:
    """Pages in a part of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(part)


def on_page_content(html: str, **_: Any) -> str:
    """Takes roles out of docstrings."""
    return _ROLE.sub("", html)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces each Mermaid block by its drawing."""
    return _MERMAID.sub(lambda found: flowchart_as_svg(found[1]), markdown)
