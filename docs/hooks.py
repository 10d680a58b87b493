"""Hooks of MkDocs: CONTRIBUTING.md and CHANGELOG.md are pages too, and no page loads anything from elsewhere."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP = Path(__file__).parent.parent
# A diagram of Mermaid would be drawn by a script from unpkg.com.
_FOREIGN = re.compile(r'<(?:script|img|iframe|link|source)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"|class="mermaid"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add both files, whose links lead into docs/."""
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        text = (TOP / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that work in the repository, as ../../CONTRIBUTING.md, to the pages of the site."""
    return markdown.replace("../CONTRIBUTING.md", "contributing.md").replace("../CHANGELOG.md", "changelog.md")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> None:
    """Refuse a page that needs the network to be seen."""
    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found[0]}")
