"""Reasoning sections through the gateway: split, shown, counted, and outside of grammars."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.gateway.gateway_rig import rig
from tests.rigs.gateway.tool_rig import CALL, TOOLS, asked, both_ways, fits, says, with_template
from tests.rigs.pods.fake_pods import FakeCluster


async def test_reasoning_is_split_shown_counted_and_outside_of_grammars(
    cluster: FakeCluster, smollm2_dir: Path
) -> None:
    async with rig(cluster, smollm2_dir, reasoning_parser="think") as gw:
        says(gw, f"<think>\nHm, weather.\n</think>\n\nSo:\n{CALL}")
        message, finish = await both_ways(gw, tools=TOOLS)
        assert (message["reasoning_content"], message["reasoning"]) == ("Hm, weather.",) * 2
        assert (message["content"], finish, len(message["tool_calls"])) == ("So:", "tool_calls", 1)
        usage = (await gw.chat()).json()["usage"]
        tokens = gw.gateway.tokenizer.encode("<think>\nHm, weather.\n</think>", add_special_tokens=False)
        assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - len(tokens)) <= 1
        message, _ = await both_ways(gw, include_reasoning=False)
        assert not {"reasoning", "reasoning_content"} & message.keys()
        assert message["content"].startswith("So:")
        # The client's grammar applies after the section.
        await gw.chat(response_format={"type": "json_object"})
        assert fits(smollm2_dir, asked(gw).grammar, "<think>x</think>{}")
        says(gw, "<think>on and on" * 4)
        message, finish = await both_ways(gw, max_tokens=8)
        assert finish == "length"
        assert message["reasoning_content"]
        assert message["content"] in (None, "")
    async with rig(cluster, smollm2_dir, reasoning_parser="none") as gw:
        says(gw, "<think>x</think>y")
        message, _ = await both_ways(gw)
        assert message["content"] == "<think>x</think>y"
        usage = (await gw.chat()).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_template_may_begin_the_section(cluster: FakeCluster, tmp_path: Path, smollm2_dir: Path) -> None:
    model = with_template(
        tmp_path,
        smollm2_dir,
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{{ '<think>\\n' if enable_thinking is not false else '<think>\\n\\n</think>\\n\\n' }}",
    )
    async with rig(cluster, model) as gw:  # chosen by the template
        says(gw, "hm</think>\nyes")
        message, _ = await both_ways(gw)
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        await gw.chat(structured_outputs={"choice": ["yes"]})
        assert fits(smollm2_dir, asked(gw).grammar, "hm</think>\nyes")
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        says(gw, "yes")
        message, _ = await both_ways(gw, **off)
        assert (message.get("reasoning_content"), message["content"]) == (None, "yes")
        await gw.chat(structured_outputs={"choice": ["yes"]}, **off)
        assert fits(smollm2_dir, asked(gw).grammar, "yes")
        assert not fits(smollm2_dir, asked(gw).grammar, "hm</think>\nyes")
