"""Writes a Llama model as a float32 GGUF file, and measures llama.cpp with it.

The measurement runs this file as a script in an environment that has llama-cpp-python and numpy. Baton's environment
does not need llama-cpp-python. The tokenizer is left out of the file: prompts are token ids.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONTEXT = 512  # Longest sequence of a measurement, in tokens.
F32 = 0  # GGML's number for float32, the type of keys and values.


def write_gguf(model_dir: Path, path: Path) -> None:
    """Writes the safetensors of a Llama model with an untied or tied head to a GGUF file, in float32."""
    import gguf
    from safetensors import safe_open

    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    hidden, heads, layers = (config[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or hidden // heads
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                numbers = tensors.get_tensor(name).float().numpy()
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    # GGUF rotates neighbouring dimensions, a checkpoint dimension i with i + head_dim / 2.
                    count = heads if "q_proj" in name else kv_heads
                    split = numbers.reshape(count, 2, head_dim // 2, hidden)
                    numbers = split.swapaxes(1, 2).reshape(numbers.shape)
                if (target := names.get_name(name, try_suffixes=(".weight", ".bias"))) is not None:
                    writer.add_tensor(target, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(python: Path, gguf_file: Path, prompt: list[int], output: int, threads: int) -> dict[str, Any]:
    """Runs llama.cpp in the environment of `python`: a warm-up, then one greedy answer of `output` tokens.

    Returns `prompt_s`, `tok_s` (tokens after the first one per second) and `tokens`, the token ids of the answer.
    """
    task = json.dumps({"file": str(gguf_file), "prompt": prompt, "output": output, "threads": threads})
    done = subprocess.run([str(python), __file__], input=task, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _run(file: str, prompt: list[int], output: int, threads: int) -> dict[str, Any]:
    import llama_cpp as api
    import numpy as np

    api.llama_backend_init()
    model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file}")
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, CONTEXT, CONTEXT
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = F32
    context = api.llama_init_from_model(model, params)

    def next_token(ids: list[int]) -> int:
        numbers = (api.llama_token * len(ids))(*ids)  # the batch keeps a bare pointer to it
        batch = api.llama_batch_get_one(numbers, len(ids))
        if code := api.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode ended with code {code}")
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), shape=(vocab_size,))
        return int(logits.argmax())

    def answer(count: int) -> tuple[float, float, list[int]]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        began = time.perf_counter()
        tokens = [next_token(prompt)]
        first = time.perf_counter()
        while len(tokens) < count:
            tokens.append(next_token(tokens[-1:]))
        return first - began, (count - 1) / (time.perf_counter() - first), tokens

    answer(4)
    prompt_s, rate, tokens = answer(output)
    return {"prompt_s": prompt_s, "tok_s": rate, "tokens": tokens}


if __name__ == "__main__":
    print(json.dumps(_run(**json.loads(sys.stdin.read()))))
