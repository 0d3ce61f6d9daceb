"""Atomic replacement of a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_file_atomically(path: Path, content: bytes, mode: int) -> None:
    """Replaces `path` by a synced file with these permission bits. If it raises, the directory is unchanged."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)  # exists only if the replacement failed
