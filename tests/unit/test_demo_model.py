"""The demo's model: its name stands for the converted directory; errors give the reason why it is not converted."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.demo import model as demo
from common.errors import ConfigError
from common.model.directory import resolve_model, smollm2_dir


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_name_is_refused_until_the_model_is_converted() -> None:
    with pytest.raises(ConfigError, match="`baton up`") as refused:
        resolve_model("smollm2")
    assert refused.value.field == "model"


def test_the_model_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def convert(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        dest = Path(argv[-1])
        dest.mkdir()
        (dest / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (dest / "tokenizer.json").write_text("{}")
        (dest / "model.safetensors").write_bytes(b"")
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", convert)
    found = [demo.prepared("smollm2", say=said.append) for _ in range(2)]
    assert found == [smollm2_dir()] * 2
    assert len(said) == 1
    assert resolve_model("smollm2") == smollm2_dir()


def test_a_failed_conversion_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 2, "", "a warning\nbaton: the disk is full\n")
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="converting the demo model failed: the disk is full"):
        demo.demo_model()


def test_the_error_names_a_cache_that_is_not_writable(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"the model cache .* is not usable"):
        demo.demo_model()


def test_the_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match="the demo model is not installed: pip install"):
        demo.demo_model()


def test_the_wait_for_another_conversion_has_a_deadline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CONVERSION_DEADLINE_S", 0.1)
    dest = smollm2_dir()
    dest.parent.mkdir(parents=True)
    with dest.with_name(f".{dest.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another process has held .* for over 0 s"):
            demo.demo_model()
