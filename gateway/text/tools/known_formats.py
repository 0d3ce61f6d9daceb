"""Descriptions of the tool formats of known models. One description is one row: see MarkedFormat.

The order counts: `auto` takes the first format that fits the chat template, else the first that fits the architecture,
else the first that fits the name. A format stands before the formats with more general signs.
"""

from __future__ import annotations

from gateway.text.tools.arguments import TaggedArguments
from gateway.text.tools.escaped import EscapedArguments
from gateway.text.tools.format import Signs
from gateway.text.tools.marked import MarkedFormat
from gateway.text.tools.pythonic import PythonArguments

QWEN3_CODER = MarkedFormat(
    name="qwen3_coder",
    source="https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct/blob/main/chat_template.jinja",
    call="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
    arguments=TaggedArguments("<parameter=$key>\n$value\n</parameter>\n"),
    also="<function=",  # the model leaves out <tool_call> at times
    signs=Signs(template=("<tool_call>", "<function=", "<parameter="), name=r"qwen3-?coder"),
)

SEED_OSS = MarkedFormat(
    name="seed_oss",
    source="https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct/blob/main/chat_template.jinja",
    call="<seed:tool_call>\n<function=$name>\n$arguments</function>\n</seed:tool_call>",
    arguments=TaggedArguments("<parameter=$key>$value</parameter>\n"),
    signs=Signs(tokens=("<seed:tool_call>",), architectures=("SeedOssForCausalLM", "seed_oss")),
)

GLM_45 = MarkedFormat(
    name="glm45",  # and GLM 4.6 and 4.7, which leave out the line breaks
    source="https://huggingface.co/zai-org/GLM-4.5/blob/main/chat_template.jinja",
    call="<tool_call>$name\n$arguments</tool_call>",
    arguments=TaggedArguments("<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"),
    signs=Signs(
        template=("<tool_call>", "<arg_key>"),
        architectures=("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "glm4_moe"),
        name=r"glm-?4\.[5-9]",
    ),
)

DEEPSEEK_V3 = MarkedFormat(
    name="deepseek_v3",  # and R1
    source="https://huggingface.co/deepseek-ai/DeepSeek-V3-0324/blob/main/tokenizer_config.json",
    section="<｜tool▁calls▁begin｜>$calls<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    signs=Signs(template=("<｜tool▁sep｜>", "```json"), name=r"deepseek-?(r1|v3(?![.\d]))"),
)

DEEPSEEK_V31 = MarkedFormat(
    name="deepseek_v31",
    source="https://huggingface.co/deepseek-ai/DeepSeek-V3.1/blob/main/assets/chat_template.jinja",
    section="<｜tool▁calls▁begin｜>$calls<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
    separator="",
    signs=Signs(template=("<｜tool▁sep｜>",), name=r"deepseek-?v3\.1"),
)

KIMI_K2 = MarkedFormat(
    name="kimi_k2",
    source="https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md",
    section="<|tool_calls_section_begin|>$calls<|tool_calls_section_end|>",
    call="<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
    separator="",
    call_id="functions.$name:$index",
    signs=Signs(tokens=("<|tool_calls_section_begin|>",), name=r"kimi-?k2"),
)

MINIMAX_M1 = MarkedFormat(
    name="minimax",
    source="https://huggingface.co/MiniMaxAI/MiniMax-M1-80k/blob/main/docs/function_call_guide.md",
    section="<tool_calls>\n$calls\n</tool_calls>",
    call="$call",
    signs=Signs(
        template=("<tool_calls></tool_calls> XML tags", '{"name": <tool-name>'),
        architectures=("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM", "minimax_m1"),
        name=r"minimax-?m1",
    ),
)

MINIMAX_M2 = MarkedFormat(
    name="minimax_m2",
    source="https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md",
    section="<minimax:tool_call>\n$calls\n</minimax:tool_call>",
    call='<invoke name="$name">\n$arguments</invoke>',
    arguments=TaggedArguments('<parameter name="$key">$value</parameter>\n'),
    signs=Signs(
        tokens=("<minimax:tool_call>",), architectures=("MiniMaxM2ForCausalLM", "minimax_m2"), name=r"minimax-?m2"
    ),
)

GRANITE_3 = MarkedFormat(
    name="granite",  # Granite 3; Granite 4 writes hermes
    source="https://huggingface.co/ibm-granite/granite-3.3-2b-instruct/blob/main/chat_template.jinja",
    section="<|tool_call|>[$calls]",
    call="$call",
    separator=", ",
    also_openings=("<tool_call>[",),  # Granite 3.1 at times
    also_closing="</tool_call>",
    signs=Signs(template=("<|tool_call|>",), name=r"granite-?3"),
)

PHI4_MINI = MarkedFormat(
    name="phi4_mini",  # with the template of Microsoft's guide
    source="https://github.com/microsoft/PhiCookBook/blob/main/md/02.Application/07.FunctionCalling",
    section="functools[$calls]",
    call="$call",
    separator=", ",
    marker="functools[",
    also_openings=("<|tool_call|>[",),
    also_closing="<|/tool_call|>",
    signs=Signs(template=("functools[",)),
)

PHI4_MINI_TAGS = MarkedFormat(
    name="phi4_mini_tags",  # with the model's own template
    source="https://huggingface.co/microsoft/Phi-4-mini-instruct#tool-enabled-function-calling-format",
    section="<|tool_call|>[$calls]<|/tool_call|>",
    call="$call",
    separator=", ",
    also_openings=("functools[",),
    signs=Signs(tokens=("<|/tool_call|>",), name=r"phi-?4-mini"),
)

XLAM = MarkedFormat(
    name="xlam",
    source="https://huggingface.co/Salesforce/Llama-xLAM-2-8b-fc-r/blob/main/tokenizer_config.json",
    section="[$calls]",
    call="$call",
    separator=", ",
    also_openings=("```json\n[", "[TOOL_CALLS]["),
    also_closing="```",
    signs=Signs(template=('[{"name": "tool_call_name", "arguments":',), name=r"xlam"),
)

OLMO_3 = MarkedFormat(
    name="olmo3",
    source="https://huggingface.co/allenai/Olmo-3-7B-Instruct/blob/main/chat_template.jinja",
    section="<function_calls>$calls</function_calls>",
    call="$name($arguments)",
    arguments=PythonArguments(json_values=True),
    signs=Signs(tokens=("<function_calls>",), architectures=("Olmo3ForCausalLM", "olmo3"), name=r"olmo-?3"),
)

FUNCTION_GEMMA = MarkedFormat(
    name="functiongemma",
    source="https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices",
    call="<start_function_call>call:$name{$arguments}<end_function_call>",
    separator="",
    arguments=EscapedArguments("<escape>"),
    signs=Signs(tokens=("<start_function_call>",), name=r"functiongemma"),
)

GEMMA_4 = MarkedFormat(
    name="gemma4",
    source="https://huggingface.co/google/gemma-4-31B-it/blob/main/chat_template.jinja",
    call="<|tool_call>call:$name{$arguments}<tool_call|>",
    separator="",
    arguments=EscapedArguments('<|"|>'),
    signs=Signs(
        tokens=("<|tool_call>",),
        architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "gemma4"),
        name=r"gemma-?4",
    ),
)

KNOWN_FORMATS = (
    QWEN3_CODER,
    SEED_OSS,
    GLM_45,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    MINIMAX_M1,
    MINIMAX_M2,
    PHI4_MINI,
    PHI4_MINI_TAGS,
    GRANITE_3,
    XLAM,
    OLMO_3,
    FUNCTION_GEMMA,
    GEMMA_4,
)
