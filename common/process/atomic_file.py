"""A file's new content all at once, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_file_atomically(path: Path, content: bytes, mode: int) -> None:
    """Writes beside `path`, syncs, and takes its place with these permissions. What is raised, OSError or Ctrl-C,
    leaves the directory as it was.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)  # it is there only where it did not take the place
