"""Flags of vLLM that Baton does not have, each with the answer that a user gets.

A flag with an equal meaning is another name of Baton's flag (`also=` in common/settings). This file has the others.
Harmless flags are dropped with a message; each other flag is an error with a hint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OtherFlag:
    """A flag of another server."""

    hint: str  # What Baton does instead.
    harmless: bool = False  # The command continues without the flag.
    takes_value: bool = True


def _always(hint: str) -> OtherFlag:
    return OtherFlag(hint, harmless=True, takes_value=False)


def _ignored(hint: str) -> OtherFlag:
    return OtherFlag(hint, harmless=True)


def _refused(hint: str, *, takes_value: bool = True) -> OtherFlag:
    return OtherFlag(hint, takes_value=takes_value)


_TOOLS = "tools work for every model with a tool format; --tool-parser names one"
_ADAPTERS = "use --adapter-dir DIR, with a sub-folder for each adapter, and --adapter-names FILE for other names"
_SPECULATION = (
    "use --speculation ngram, suffix, draft_model or eagle, with --speculation-model and --speculation-tokens"
)
_NO_PARALLEL = "use --prefill N and --decode N for more pods, or --tensor-parallel-size N for larger ones"
_NO_CODE = "Baton never runs code from a model's directory; it serves the model with its own code or with transformers'"

OTHER_FLAGS: dict[str, OtherFlag] = {
    "--enable-prefix-caching": _always("prefixes are cached by default"),
    "--no-enable-prefix-caching": _refused("use --no-prefix-cache", takes_value=False),
    "--enable-chunked-prefill": _always("prompts are always computed in chunks, of --chunk-tokens"),
    "--no-enable-chunked-prefill": _refused(
        "prompts are always computed in chunks; --chunk-tokens sets their length", takes_value=False
    ),
    "--enable-auto-tool-choice": _always(_TOOLS),
    "--trust-remote-code": _always(_NO_CODE),
    "--disable-log-requests": _always("requests are not logged"),
    "--no-enable-log-requests": _always("requests are not logged"),
    "--disable-log-stats": _always("figures are not logged; /metrics and the dashboard show them"),
    "--enable-prompt-tokens-details": _always("usage always counts cached tokens"),
    "--enable-request-id-headers": _always("every answer has x-request-id"),
    "--async-scheduling": _always("steps overlap by default on a GPU; --no-overlap turns that off"),
    "--enable-log-requests": _refused("prompts are not logged; use --traces TARGET", takes_value=False),
    "--enforce-eager": _refused(
        "pods of their own take --no-cuda-graphs: baton serve --role ROLE --no-cuda-graphs", takes_value=False
    ),
    "--swap-space": _ignored("preempted sequences are kept by --host-cache SIZE"),
    "--cpu-offload-gb": _refused("weights stay on the device; use --tensor-parallel-size N if they do not fit"),
    "--max-num-partial-prefills": _ignored("the scheduler computes several prompts at once by itself"),
    "--scheduling-policy": _ignored("requests wait in fair order by tenant, then by their priority"),
    "--num-gpu-blocks-override": _refused("use --kv-memory SIZE"),
    "--kv-transfer-config": _refused("prefill and decode exchange KV by themselves; `baton up` needs no connector"),
    "--pipeline-parallel-size": _refused(_NO_PARALLEL),
    "--data-parallel-size": _refused(_NO_PARALLEL),
    "--quantization": _refused(
        "a quantised checkpoint is recognised by its config; --weights fp8 and --weights int8 quantise another one "
        "while it loads; --kv-dtype fp8_e4m3 halves KV"
    ),
    "--enable-lora": _always(_ADAPTERS),
    "--lora-modules": _refused(_ADAPTERS),
    "--speculative-config": _refused(_SPECULATION),
    "--revision": _refused("name the revision with the model: --model NAME@REVISION"),
    "--code-revision": _refused(_NO_CODE),
    "--tokenizer": _refused("the tokenizer is that of the model's directory"),
    "--tokenizer-mode": _ignored("the tokenizer is always the fast one of tokenizer.json"),
    "--hf-token": _refused("set the variable HF_TOKEN, or run `hf auth login`"),
    "--download-dir": _refused("set the variable HF_HUB_CACHE"),
    "--seed": _ignored("a request sets `seed`; without one it is random"),
    "--max-logprobs": _ignored("a request may ask for as many as OpenAI's API allows"),
    "--max-seq-len-to-capture": _ignored("decode steps are CUDA graphs at every length"),
    "--disable-custom-all-reduce": _always("there is no custom all-reduce"),
    "--uvicorn-log-level": _refused("use --log-level"),
    "--ssl-keyfile": _refused("use `baton gateway --tls-cert FILE --tls-key FILE`, or a TLS proxy before `baton up`"),
    "--ssl-certfile": _refused("use `baton gateway --tls-cert FILE --tls-key FILE`, or a TLS proxy before `baton up`"),
    "--override-generation-config": _refused("edit generation_config.json in the model's directory"),
    "--limit-mm-per-prompt": _ignored("models get text only"),
    "--task": _ignored("the task follows from the endpoint: /v1/embeddings, /v1/chat/completions and others"),
    "--runner": _ignored("the task follows from the endpoint: /v1/embeddings, /v1/chat/completions and others"),
}
SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
}


def translate(args: list[str], known: Collection[str], say: Callable[[str], None]) -> list[str]:
    """Returns the arguments of a command in Baton's words. `known` are the command's own flags.

    Replaces short flags, and underscores in flags. Drops flags that ask for what Baton does anyway, and says so.
    Raises ConfigError for other flags of OTHER_FLAGS.
    """
    result, rest = list[str](), iter(args)
    for word in rest:
        if word == "--":
            return [*result, word, *rest]
        flag, equals, value = word.partition("=")
        flag = SHORT.get(flag, flag)
        if flag.startswith("--") and flag not in known and "_" in flag:
            flag = flag.replace("_", "-")
        other = None if flag in known else OTHER_FLAGS.get(flag)
        if other is None:
            result.append(f"{flag}{equals}{value}")
        elif not other.harmless:
            raise ConfigError(f"{flag}: not a flag of Baton: {other.hint}", field=flag.lstrip("-"))
        else:
            if other.takes_value and not equals:
                next(rest, None)
            say(f"{flag} has no effect: {other.hint}")
    return result
