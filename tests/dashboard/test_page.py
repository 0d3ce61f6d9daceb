"""The dashboard in a real browser, with a gateway over fake pods."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed: make dashboard-test")

from playwright.async_api import Browser, expect

from common.pb import transfer_pb2
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from tests.dashboard.conftest import View
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.pods.fake_pods import FakeCluster
from tests.rigs.pods.scripted import counting
from tests.rigs.waiting import until

KINDS = ["gateway", "queue", "chunk 1", "pushes", "hand-off", "decode"]
VIEWS = ["Cluster", "Requests", "Playground"]


async def names(view: View, root: str) -> list[str]:
    """Returns the names of the bars in the waterfall of an element."""
    return await view.page.locator(f"{root} .waterfall .key").all_inner_texts()


async def test_the_cluster_is_shown_as_it_is(view: View, gw: Rig, cluster: FakeCluster) -> None:
    decode = cluster.decodes[0]
    decode.blocks = transfer_pb2.PoolCounts(free=6, cached=2, leased=7, quarantined=1)
    decode.activity.drafts.CopyFrom(transfer_pb2.Drafts(proposer="ngram", chains=4, proposed=8, accepted=6))
    assert (await gw.complete(max_tokens=4)).status_code == 200
    await view.page.goto(gw.url)
    row = view.page.locator("#pods tbody tr", has_text="decode-0")
    await expect(row).to_contain_text("ready")
    await expect(row.get_by_role("img")).to_have_attribute("aria-label", "7 leased, 2 cached, 1 quarantined, 6 free")
    await expect(row).to_contain_text("2.50 (ngram)")
    await expect(view.page.locator("#gateway")).to_contain_text(f"{MODEL}: ready · 2 of 2 pods")
    await expect(view.page.locator(".tile", has_text="TTFT p50")).not_to_contain_text("–")
    cluster.decodes[0].draining = True
    await expect(row).to_contain_text("draining")


async def test_a_chart_tells_its_values_to_the_keyboard(view: View, gw: Rig) -> None:
    for _ in range(2):
        assert (await gw.complete(max_tokens=4)).status_code == 200
        gw.server.metrics_history.take()
    await view.page.goto(gw.url)
    chart = view.page.locator(".chart", has_text="Time to first token")
    await chart.focus()
    await expect(chart.locator("path").first).to_be_attached()
    await view.page.keyboard.press("ArrowLeft")
    await expect(chart.locator("[aria-live]")).to_contain_text("p50")
    await expect(chart.locator(".cursor")).to_be_attached()
    await view.page.keyboard.press("Escape")
    await expect(chart.locator(".cursor")).to_have_count(0)


async def test_a_request_appears_while_it_runs_and_opens_its_waterfall(
    view: View, gw: Rig, cluster: FakeCluster
) -> None:
    await view.page.goto(f"{gw.url}/#/requests")
    await expect(view.page.locator("#list")).to_contain_text("No requests yet")
    cluster.decodes[0].faults.stall_after = 2
    task = asyncio.create_task(gw.complete(max_tokens=8))
    line = view.page.locator(".request")
    await expect(line.locator(".state")).to_have_text("running")
    await line.locator("summary").focus()
    await view.page.keyboard.press("Enter")
    await expect(line.locator(".waterfall")).to_be_visible()
    task.cancel()
    await expect(line.locator(".state")).to_have_text("aborted")
    await expect(line.locator(".waterfall")).to_be_visible()  # stays open and keeps the focus
    assert await view.page.evaluate("document.activeElement.tagName") == "SUMMARY"
    cluster.decodes[0].faults.stall_after = None
    assert (await gw.complete(max_tokens=3)).status_code == 200
    await expect(line).to_have_count(2)
    first = line.first  # the newest
    await first.locator("summary").click()
    await expect(first.locator(".waterfall .key")).to_have_text(KINDS)
    assert await first.locator(".waterfall .bar").count() == len(KINDS)


async def test_a_chat_shows_the_waterfall_of_its_own_request(view: View, gw: Rig, cluster: FakeCluster) -> None:
    await view.page.goto(gw.url)
    await view.tab("Playground")
    await view.page.get_by_label("Max tokens").fill("6")
    prompt = view.page.get_by_label("Message")
    await prompt.fill("<img src=x onerror=alert(1)> <b>hi</b>")
    await prompt.press("Enter")
    answer = view.page.locator(".message.assistant span").last
    await until(lambda: len(cluster.prefills[0].seen.prefilled) == 1)
    (asked,) = cluster.prefills[0].seen.prefilled
    await expect(answer).to_have_text(gw.gateway.tokenizer.decode(counting(asked)))
    await expect(view.page.locator(".message.user")).to_have_text("You<img src=x onerror=alert(1)> <b>hi</b>")
    await expect(view.page.locator("#this-request .waterfall .key")).to_have_text(KINDS)
    (timeline,) = gw.gateway.timelines.newest()
    await expect(view.page.locator("#this-request")).to_contain_text(timeline.request_id)
    await prompt.fill("and again")
    await view.page.get_by_role("button", name="Send").click()
    await expect(view.page.locator(".message.assistant")).to_have_count(2)
    await until(lambda: len(cluster.prefills[0].seen.prefilled) == 2)
    first, second = cluster.prefills[0].seen.prefilled
    assert second.prompt_len > first.prompt_len + 6  # the request contains the conversation
    assert second.sampling.max_tokens == 6


async def test_stop_ends_the_request_and_refusals_are_told(view: View, gw: Rig, cluster: FakeCluster) -> None:
    cluster.decodes[0].faults.stall_after = 2
    await view.page.goto(f"{gw.url}/#/playground")
    prompt = view.page.get_by_label("Message")
    await prompt.fill("hello")
    await prompt.press("Enter")
    await expect(view.page.locator(".message.assistant span").last).not_to_be_empty()
    await view.page.get_by_role("button", name="Stop").click()
    await until(lambda: bool(cluster.decodes[0].seen.decode_aborts))
    cluster.decodes[0].faults.stall_after = None
    await view.page.get_by_label("Temperature").fill("")
    await view.page.get_by_label("Max tokens").fill("100000")
    await prompt.fill("hello")
    await prompt.press("Enter")
    await expect(view.page.locator(".message.failed")).to_contain_text("max_tokens")
    view.errors[:] = [said for said in view.errors if "400" not in said]  # Chromium logs every refusal


async def test_a_key_is_asked_for_and_kept_in_the_tab(
    view: View, cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    secret, record = create_key("mine")
    KeyFile(tmp_path / "keys.json").add(record)
    async with rig(cluster, smollm2_dir, api_keys=(str(tmp_path / "keys.json"),)) as gw:
        await view.page.goto(gw.url)
        dialog = view.page.get_by_role("dialog")
        await dialog.get_by_label("Key").fill("sk-wrong")
        await view.page.keyboard.press("Enter")
        await expect(view.page.locator("#trouble")).to_be_visible()
        assert await view.page.locator("#pods tbody").count() == 0
        await view.page.get_by_role("button", name="API key").click()
        await dialog.get_by_label("Key").fill(secret)
        await dialog.get_by_role("button", name="Use it").click()
        await expect(view.page.locator("#pods")).to_contain_text("decode-0")
        await expect(view.page.locator("#trouble")).to_be_hidden()
        assert await view.page.evaluate("Object.values(localStorage).join()") == ""
        await view.page.goto("about:blank")  # leaves the page before the gateway stops
    view.errors[:] = [said for said in view.errors if "401" not in said]


async def test_themes_follow_the_system_until_one_is_chosen(browser: Browser, gw: Rig) -> None:
    page = await browser.new_page(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    await page.goto(gw.url)
    dark = await page.evaluate(background)
    await page.get_by_label("Theme").select_option("light")
    light = await page.evaluate(background)
    assert dark != light
    await page.reload()
    assert await page.evaluate(background) == light
    await page.get_by_label("Theme").select_option("")
    assert await page.evaluate(background) == dark
    await page.close()


@pytest.mark.parametrize("width", [360, 768])
async def test_narrow_screens_do_not_scroll_sideways(view: View, gw: Rig, width: int) -> None:
    assert (await gw.complete(max_tokens=4)).status_code == 200
    await view.page.set_viewport_size({"width": width, "height": 740})
    await view.page.goto(gw.url)
    await expect(view.page.locator("#pods")).to_contain_text("decode-0")
    for name in VIEWS:
        await view.tab(name)
        if name == "Requests":
            await view.page.locator("summary").click()
        box: Any = await view.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert box[0] <= box[1], name


async def test_everything_is_reached_by_the_keyboard(view: View, gw: Rig) -> None:
    await view.page.goto(gw.url)
    await view.page.get_by_role("tab", name="Cluster").focus()
    for name in (*VIEWS[1:], VIEWS[0]):
        await view.page.keyboard.press("ArrowRight")
        await expect(view.page.get_by_role("tab", name=name, selected=True)).to_be_focused()
        await expect(view.page.get_by_role("tabpanel", name=name)).to_be_visible()
    nameless = await view.page.evaluate(
        "[...document.querySelectorAll('input,select,textarea,button')]"
        ".filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).map((e) => e.id)"
    )
    assert nameless == []
    await view.page.goto(f"{gw.url}/#/requests")
    await expect(view.page.get_by_role("tab", name="Requests", selected=True)).to_be_visible()


async def test_a_gateway_that_leaves_is_told_and_one_that_comes_back_too(
    view: View, cluster: FakeCluster, smollm2_dir: Path, unused_tcp_port: int
) -> None:
    async with rig(cluster, smollm2_dir, port=unused_tcp_port) as gw:
        await view.page.goto(gw.url)
        await expect(view.page.locator("#pods")).to_contain_text("decode-0")
    await expect(view.page.locator("#trouble")).to_contain_text("does not answer")
    async with rig(cluster, smollm2_dir, port=unused_tcp_port):
        await expect(view.page.locator("#trouble")).to_be_hidden()
    view.errors.clear()  # Chromium logs every failed request
