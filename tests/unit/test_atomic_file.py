"""A file is replaced as a whole, with the given permissions; after a failure the directory is unchanged."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from common.process.atomic_file import write_file_atomically


@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("there", [False, True])
def test_the_file_has_the_content_and_the_permissions(mode: int, there: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if there:
        path.write_bytes(b"a longer one before")
    write_file_atomically(path, b"new", mode)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["os.fchmod", "os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_no_other(
    call: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise error

    path = tmp_path / "file"
    path.write_bytes(b"before")
    monkeypatch.setattr(call, full)
    with pytest.raises(type(error)):
        write_file_atomically(path, b"new", 0o644)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
