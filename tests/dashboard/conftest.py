"""A headless Chromium. The tests skip without Playwright or Chromium; `make dashboard-test` installs both."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def executable() -> str | None:
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    path = executable()
    if path is None:
        pytest.skip("no Chromium on the PATH (apt-get install chromium), nor in the environment as CHROMIUM")
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        await launched.close()


@dataclass
class View:
    """A page and the unexpected messages of its console."""

    page: Page
    errors: list[str] = field(default_factory=list)

    async def tab(self, name: str) -> None:
        await self.page.get_by_role("tab", name=name).click()


@pytest_asyncio.fixture
async def view(browser: Browser, gw: Rig) -> AsyncIterator[View]:
    """A page that must not violate its CSP, throw, or request anything but the gateway. Closes before the gateway."""
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(20_000)
    view = View(page)
    page.on("pageerror", lambda error: view.errors.append(str(error)))
    page.on("console", lambda said: view.errors.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: None if "//127.0.0.1:" in asked.url else view.errors.append(asked.url))
    yield view
    await page.close()
    assert view.errors == []


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """One prefill and one decode pod."""
    async with fake_cluster() as c:
        yield c


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir) as r:
        yield r
