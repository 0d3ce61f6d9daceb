"""Takes the pictures of the dashboard for docs/, from a running stack under load.

make up                                     (in another terminal)
python tests/dashboard/screenshots.py --url http://127.0.0.1:8000 --out docs
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright

from tests.dashboard.conftest import executable

STORY = (
    "The lighthouse on Gull Point was built in 1871 after three ships were lost on the reef in a single winter. Its "
    "keeper, Marta Lind, kept the lamp burning for forty years and wrote down the weather every night in a long row of "
    "blue notebooks. When the lamp was made electric in 1932, the notebooks were forgotten in a cellar. A student "
    "found them ninety years later, and they turned out to be the longest unbroken record of storms on that coast. "
)
QUESTION = STORY + "What did the student find?"


async def _chat(page: Page) -> None:
    await page.get_by_label("Message").fill(QUESTION)
    await page.get_by_label("Max tokens").fill("64")
    await page.keyboard.press("Tab")
    await page.get_by_role("button", name="Send").click()
    await page.locator("#this-request .waterfall", has_text="decode").wait_for(timeout=60_000)
    await page.get_by_role("button", name="Stop").wait_for(state="hidden", timeout=120_000)
    await page.wait_for_timeout(1000)


async def take(browser: Browser, url: str, out: Path) -> None:
    """Takes the cluster view in light and dark, the request list, the playground and a narrow screen."""
    for scheme in ("light", "dark"):
        page = await browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 960})  # type: ignore[arg-type]
        await page.goto(f"{url}/#/cluster")
        await page.locator("#pods tbody tr").first.wait_for()
        await page.screenshot(path=out / f"dashboard-{scheme}.png")
        if scheme == "dark":
            await page.get_by_role("tab", name="Playground").click()
            await _chat(page)
            await page.screenshot(path=out / "dashboard-playground.png")
        else:
            await page.get_by_role("tab", name="Requests").click()
            await page.locator("summary", has_text="ok").first.click()
            await page.wait_for_timeout(300)
            await page.screenshot(path=out / "dashboard-requests.png")
        await page.close()
    page = await browser.new_page(viewport={"width": 390, "height": 844})
    await page.goto(f"{url}/#/cluster")
    await page.locator("#pods tbody tr").first.wait_for()
    await page.screenshot(path=out / "dashboard-narrow.png")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        await take(browser, args.url, args.out)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
