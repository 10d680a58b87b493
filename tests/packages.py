"""Packages of Debian, for tests of what is taken out of them."""

import io
import tarfile
from collections.abc import Mapping


def made(files: Mapping[str, bytes]) -> bytes:
    """Return a package that would install these files, by path."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    found = b"!<arch>\n"
    for name, member in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", archive.getvalue())):
        head = f"{name:<16}{'0':<12}{'0':<6}{'0':<6}{'100644':<8}{len(member):<10}`\n".encode()
        found += head + member + b"\n" * (len(member) % 2)
    return found
