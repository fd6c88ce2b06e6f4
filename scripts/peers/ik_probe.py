"""Times ik_llama.cpp through its Python wheel. Run as a file by the interpreter that has it; imports no realizar.

    python ik_probe.py MODEL THREADS PROMPT_TOKENS GEN_TOKENS REPEATS REPACK FLASH_ATTENTION

The last two are 0 or 1. The last line of stdout is {"prefill": [tokens/s, ...], "decode": [tokens/s, ...]}: decode
after the prompt's tokens, one at a time, without sampling.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any


def measure(model_path: str, threads: int, prompt: int, generated: int, repeats: int, repack: bool, flash: bool) -> Any:
    """Tokens per second of each repeat, a warm-up before."""
    api = importlib.import_module("ik_llama_cpp._ctypes_api")
    internals = importlib.import_module("ik_llama_cpp._internals")
    api.llama_backend_init()
    model_settings = api.llama_model_default_params()
    model_settings.repack_tensors = repack
    if repack:
        model_settings.use_mmap = False  # repacking writes to the tensors
    model = api.llama_model_load_from_file(model_path.encode(), model_settings)
    settings = api.llama_context_default_params()
    settings.n_ctx = prompt + generated + 32
    settings.n_batch = settings.n_ctx
    settings.n_threads = settings.n_threads_batch = threads
    settings.flash_attn = flash
    context = api.llama_init_from_model(model, settings) if model else None
    if not context:
        raise SystemExit("ik_llama.cpp could not load the model")
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    tokens = [(7919 * position + 11) % vocabulary for position in range(prompt)]

    def decode(batch: Any) -> None:
        if api.llama_decode(context, batch) != 0:
            raise SystemExit("ik_llama.cpp could not decode")
        api.llama_get_logits_ith(context, batch.n_tokens - 1)
        api.llama_batch_free(batch)

    speeds: dict[str, list[float]] = {"prefill": [], "decode": []}
    for repeat in range(repeats + 1):
        api.llama_kv_cache_clear(context)
        start = time.perf_counter()
        decode(internals.make_batch_range(tokens, pos_start=0))
        between = time.perf_counter()
        for step in range(generated):
            decode(internals.make_batch_single(tokens[step % prompt], prompt + step))
        end = time.perf_counter()
        if repeat:
            speeds["prefill"].append(prompt / (between - start))
            speeds["decode"].append(generated / (end - between))
    return speeds


if __name__ == "__main__":
    path, (threads, prompt, generated, repeats, repack, flash) = sys.argv[1], map(int, sys.argv[2:])
    result = measure(path, threads, prompt, generated, repeats, bool(repack), bool(flash))
    sys.stdout.write("\n" + json.dumps(result) + "\n")
