"""The code of CONTRIBUTING.md as it stands there, and distributions that offer it, or other code, as plug-ins."""

import re
from pathlib import Path

from cluster import ROOT


def shown(section: str) -> list[str]:
    """The blocks of Python in a section of CONTRIBUTING.md, by the section's heading."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, section
    return re.findall(r"^```python\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)


def offer(folder: Path, module: str, code: str, group: str = "algorithms", name: str = "") -> Path:
    """Create the files that installing a distribution `name` with a plug-in puts in a folder of Python's path; returns
    that folder. The module lies in the package `name`, or by itself without one.
    """
    package, info = folder / name, folder / f"{name or module}-1.0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    info.mkdir()
    if name:
        (package / "__init__.py").touch()
    (package / f"{module}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name or module}\nVersion: 1.0\n")
    path = f"{name}.{module}" if name else module
    (info / "entry_points.txt").write_text(f"[geomx.{group}]\n{module} = {path}\n")
    return folder
