"""Hooks of MkDocs: CONTRIBUTING.md and CHANGELOG.md, which stand at the top of the repository, are pages of the site too."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP = Path(__file__).parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add both files, whose links lead into docs/."""
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = (TOP / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that work in the repository, as ../../CONTRIBUTING.md, to the pages of the site."""
    return markdown.replace("../CONTRIBUTING.md", "contributing.md").replace("../CHANGELOG.md", "changelog.md")
