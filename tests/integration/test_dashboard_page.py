"""The files of the dashboard's page: their headers, access without a key, and no references to other hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from gateway.dashboard.routes import FILES
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster

TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}


async def test_the_page_and_its_files(gw: Rig) -> None:
    page = await gw.http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for file in sorted(FILES.iterdir()):
        answer = await gw.http.get(f"/dashboard/page/{file.name}")
        assert answer.status_code == 200, file.name
        assert answer.headers["content-type"].startswith(TYPES[file.suffix])
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.content == file.read_bytes()
        same = await gw.http.get(f"/dashboard/page/{file.name}", headers={"if-none-match": answer.headers["etag"]})
        assert same.status_code == 304
    assert (await gw.http.get("/dashboard/page/none.js")).status_code == 404
    assert (await gw.http.get("/dashboard/page/../page.py")).status_code == 404
    assert (await gw.http.get("/dashboard/page/%2e%2e/page.py")).status_code == 404


async def test_the_page_needs_no_key_and_its_data_does(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    KeyFile(tmp_path / "keys.json").add(create_key("mine")[1])
    async with rig(cluster, smollm2_dir, api_keys=(str(tmp_path / "keys.json"),)) as gw:
        assert (await gw.http.get("/")).status_code == 200
        assert (await gw.http.get("/dashboard/page/main.js")).status_code == 200
        for path in ("/dashboard/state", "/dashboard/requests", "/dashboard/pages", "/dashboard"):
            assert (await gw.http.get(path)).status_code == 401, path


@pytest.mark.parametrize("file", sorted(FILES.iterdir()), ids=lambda file: file.name)
def test_a_file_refers_only_to_existing_files(file: Path) -> None:
    source = file.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/)", source)
    for name in re.findall(r"""from "\./([^"]+)"|(?:href|src)="dashboard/page/([^"]+)\"""", source):
        assert (FILES / "".join(name)).is_file(), name
    assert "innerHTML" not in source
