"""A streamed chat request walks forward through few files of the gateway; no file only hands it on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType

import pytest

import gateway
from gateway.admission import key_store
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from gateway.pods import pod, table
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.waiting import until

#: Files of the gateway that one streamed chat request with an API key enters.
MAX_FILES = 27

ROOT = Path(gateway.__file__).parent


async def stream(gw: Rig, key: str) -> bytes:
    """Returns the events of one chat."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20}
    answer = await gw.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": messages, **options},
        headers={"authorization": f"Bearer {key}"},
    )
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_a_streamed_chat_enters_few_files(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    key, record = create_key("acme")
    KeyFile(path).add(record)
    entered: dict[str, str] = {}

    def note(frame: FrameType, event: str, _arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{ROOT}/"):
            entered.setdefault(file.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname)

    async with fake_cluster() as cluster, rig(cluster, smollm2_dir, api_keys=(str(path),)) as gw:
        # Background work must not run beside the request.
        await gw.server.metrics_history.stop()
        periods = [(pod, "INFO_PERIOD_S"), (table, "POLL_PERIOD_S"), (key_store, "FILE_PERIOD_S")]
        longest = max(getattr(module, name) for module, name in periods)
        for module, name in periods:
            monkeypatch.setattr(module, name, 60.0)
        asked, before = -1, -2
        while asked != before:  # until each loop waits for the longer period
            await asyncio.sleep(2 * longest)
            asked, before = sum(pod.seen.infos for pod in cluster.pods.values()), asked
        for _ in range(2):  # computes what is kept between requests
            await stream(gw, key)
            await gw.settled()
        sys.setprofile(note)
        try:
            events = await stream(gw, key)
            await until(lambda: not gw.gateway._requests)
        finally:
            sys.setprofile(None)
        await gw.settled()
        assert b'"completion_tokens":20' in events
        assert events.endswith(b"data: [DONE]\n\n")
    walked = [f"{file}: {function}" for file, function in entered.items()]
    assert len(walked) <= MAX_FILES, "\n".join(walked)
