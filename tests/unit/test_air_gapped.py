"""air_gapped.py packs and installs complete wheels for a machine without a package index."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import air_gapped

NAME = "toy_thing-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "wheels" / NAME
    path.parent.mkdir()
    dist_info = "toy_thing-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("toy_thing/__init__.py", "GREETING = 'hello'\n")
        file.writestr("unused_half/large.py", "x = 1\n" * 4000)
        file.writestr(f"{dist_info}/METADATA", "Metadata-Version: 2.1\nName: toy-thing\nVersion: 1.0\n")
        file.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{dist_info}/RECORD", f"toy_thing/__init__.py,,\nunused_half/large.py,,\n{dist_info}/RECORD,,\n")
    return path


def test_a_wheel_in_parts_is_installed_with_its_last_part(wheel: Path, tmp_path: Path) -> None:
    air_gapped.without(wheel, ("unused_half/",))
    whole = wheel.read_bytes()
    air_gapped.split(wheel, len(whole) // 3)
    parts = sorted(wheel.parent.iterdir())
    assert len(parts) == 4
    assert b"".join(part.read_bytes() for part in parts) == whole
    target = tmp_path / "site"
    for at, part in enumerate(parts):
        folder = tmp_path / f"install{at}"
        folder.mkdir()
        part.rename(folder / part.name)
        command = [sys.executable, air_gapped.__file__, "install", str(target), str(folder)]
        stdout = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert (target / "toy_thing").exists() == (at == len(parts) - 1)
    assert stdout.startswith("export PYTHONPATH=")
    assert stdout.strip().endswith(f':{target}"')
    code = (
        "import toy_thing; from importlib.metadata import version; print(toy_thing.GREETING, version('baton-serving'))"
    )
    env = {"PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, cwd=tmp_path, capture_output=True)
    assert done.stdout.split() == [b"hello", b"0.0.0"]
    assert not (target / "unused_half").exists()


def test_a_wheel_that_fits_stays_whole(wheel: Path) -> None:
    air_gapped.split(wheel, wheel.stat().st_size)
    assert [path.name for path in wheel.parent.iterdir()] == [NAME]


def test_closure_has_all_requirements_that_the_machine_lacks() -> None:
    pins = air_gapped.closure(air_gapped.NEEDS["serving"], air_gapped.THERE)
    names = {pin.split("==")[0] for pin in pins}
    assert {"grpcio", "redis", "hiredis", "starlette", "pydantic-core", "nixl-cu13", "execnet"} <= names
    assert not names & {"torch", "triton", "sympy", "baton-serving"}
    assert len(names) == len(pins)
