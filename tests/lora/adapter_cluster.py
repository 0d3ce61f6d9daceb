"""A gateway with real pods that have adapters, and engines with the merged models as the oracle."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoModelForCausalLM

from common.grammar.compiler import GrammarSource
from common.types import SamplingParams, Token
from engine.llm import LLM
from gateway.admission.api_keys import ANONYMOUS
from gateway.serving.request import CompletionBody, GenerationSpec
from tests.lora.lora_rig import LAYER_MODULES, merge, save_adapter
from tests.rigs.engine.draft_models import BYTES, byte_tokenizer, tiny_target
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, Cluster
from tests.rigs.waiting import until

NAMES = ("first", "second")
#: Options of `save_adapter` by name.
OPTIONS: dict[str, dict[str, Any]] = {name: {"seed": seed, "size": 0.3} for seed, name in enumerate(NAMES)}
#: A third adapter of other modules, ranks and scales.
THIRD: dict[str, Any] = {
    "seed": 2,
    "size": 0.2,
    "rank": 9,
    "rslora": True,
    "modules": (*LAYER_MODULES, "lm_head", "embed_tokens"),
    "ranks": {"0.self_attn.q_proj": 16},
    "alphas": {"down_proj": 3.0},
}


@dataclass(frozen=True)
class AdapterFiles:
    """A base model, a directory with adapters, and the merged models by name; "" is the base."""

    base: Path
    adapters: Path
    merged: dict[str, Path]

    def oracle(self, name: str) -> LLM:
        """Returns an engine with the merged model."""
        settings: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 256, "max_model_len": MAX_LEN}
        return LLM(self.merged[name], chunk_tokens=CHUNK, threads=1, device="cpu", dtype="float32", **settings)


def make_files(root: Path, options: Mapping[str, dict[str, Any]] = OPTIONS) -> AdapterFiles:
    """Writes a model with a tokenizer of bytes, adapters over it, and the models with them merged."""
    base = tiny_target(root / "base", vocab=BYTES, scale=0.4)
    byte_tokenizer(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    merged = {"": base}
    for name, own in options.items():
        folder = save_adapter(root / "adapters" / name, model, **own)
        merged[name] = root / "merged" / name
        merge(model, folder).save_pretrained(merged[name])
        shutil.copy(base / "tokenizer.json", merged[name])
    return AdapterFiles(base, root / "adapters", merged)


@dataclass
class AdapterCluster:
    """The gateway and its pods."""

    gw: Rig
    pods: Cluster

    async def ask(
        self,
        model: str,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        n: int = 1,
        grammar: GrammarSource | None = None,
        on_token: Callable[[Token], object] = lambda _token: None,
        **sampling: Any,
    ) -> list[list[int]]:
        """Returns the token ids of the n answers. Raises BatonError."""
        gateway, params = self.gw.gateway, SamplingParams(**{"temperature": 0.0, **sampling})
        spec = GenerationSpec(
            model=model,
            sampling=params,
            max_tokens=max_tokens,
            seed=7,
            n=n,
            grammar=grammar,
            ignore_eos=grammar is None,
        )
        with gateway.admit("completions", None, 60.0, caller=ANONYMOUS) as context:
            choices = await gateway.completion(context, CompletionBody(spec, (tuple(prompt),)))

            async def read(choice: Any) -> list[int]:
                ids = list[int]()
                async for piece in choice:
                    ids += [token.id for token in piece.tokens]
                    for token in piece.tokens:
                        on_token(token)
                return ids

            return await asyncio.gather(*map(read, choices))

    async def admin(self, what: str, status: int = 200, **body: str) -> dict[str, Any]:
        """Posts to /v1/load_lora_adapter or /v1/unload_lora_adapter and returns the answer."""
        answer = await self.gw.http.post(f"/v1/{what}_lora_adapter", json=body)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found


@asynccontextmanager
async def adapter_cluster(
    files: AdapterFiles,
    *,
    prefill: int = 1,
    decode: int = 1,
    prefill_config: Mapping[str, Any] | None = None,
    decode_config: Mapping[str, Any] | None = None,
    check: bool = True,
    **settings: Any,
) -> AsyncIterator[AdapterCluster]:
    """Runs pods with the adapters and a gateway. `settings` are of GatewayConfig."""
    fields = {"adapter_dir": str(files.adapters), "num_blocks": 256}
    async with Cluster.start(
        files.base,
        prefill=prefill,
        decode=decode,
        prefill_config=fields | dict(prefill_config or {}),
        decode_config=fields | dict(decode_config or {}),
        check=check,
    ) as pods:
        addresses = tuple(pod.runtime.address for pod in pods.pods)
        fakes: Any = SimpleNamespace(addresses=addresses, decodes=pods.decodes, all_idle=lambda: True)
        async with rig(fakes, files.base, models=(f"tiny={files.base}",), **settings) as gw:
            await until(lambda: all(pod.adapters._listed for pod in gw.gateway.pod_table.pods.values()))
            yield AdapterCluster(gw, pods)
