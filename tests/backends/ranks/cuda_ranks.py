"""A rank of models on the GPU backend: `cuda_ranks.py RECIPES RANK RANKS FOLDER WAYS`.

It computes the logits of each recipe's model with the other ranks, by each of the ways, and leaves them in the folder:
on a GPU for each rank, or on the processor as if it were one. By the way of `memory` kernels write that of other ranks,
by that of `calls` NCCL or gloo adds up.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

CHUNKS = (17, 3, 1)  # a block of states' and one row more
TOKENS = sum(CHUNKS)


class _Group:
    """Ranks on the processor; `folder` has memory of them all."""

    def __init__(self, rank: int, ranks: int, folder: Path | None) -> None:
        self._rank, self._ranks, self._folder = rank, ranks, folder

    def share(self, num_bytes: int) -> Any:
        if self._folder is None:
            return None
        from backends.ranks.peer_sums import Word, mapped_memory

        self.word = Word()
        return mapped_memory(self._folder, self._rank, self._ranks, num_bytes, self.word, _exchange)

    def add_up(self, values: torch.Tensor, total: torch.Tensor) -> None:
        total.copy_(values)
        distributed.all_reduce(total)

    def gather(self, own: torch.Tensor, all_values: torch.Tensor) -> None:
        distributed.all_gather(list(all_values.unbind()), own)

    def least(self, own: int) -> int:
        return min(int(word) for word in _exchange(str(own).encode()))

    def end_load(self) -> None:
        """None waits by turns of its own."""

    def close(self) -> None:
        """The process ends."""


def _exchange(word: bytes) -> list[bytes]:
    words = [b""] * distributed.get_world_size()
    distributed.all_gather_object(words, word)
    return words


def main(names: str, rank: int, ranks: int, folder: Path, ways: list[str]) -> None:
    on_cards = torch.cuda.device_count() >= ranks
    sys.path[:0] = [str(Path(__file__).parents[2])]
    if not on_cards:
        os.environ["TRITON_INTERPRET"] = "1"
        from backends.cuda import triton_interpreter  # noqa: F401
    from backend_runs import BackendRunner
    from models.ranks.test_shard import of_gpus
    from random_models import random_model, random_tokens
    from realizar.backends.cuda.device import interpreter_device, open_device
    from realizar.backends.cuda.ranks.group import GPUGroup
    from realizar.backends.cuda.runner import CUDABackend
    from realizar.backends.rank_memory import RankMemory, RankPlace
    from realizar.config import EngineConfig
    from realizar.models.shard import shard

    class Runner(BackendRunner[CUDABackend]):
        def read_logits(self, tokens: list[int]) -> NDArray[np.float32]:
            logits: NDArray[np.float32] = self.backend.logits(tokens).cpu().numpy().copy()
            return logits

    class Calls(GPUGroup):
        def share(self, num_bytes: int) -> None:
            self._join()

    store = distributed.FileStore(str(folder / "store"), ranks)
    distributed.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    config = EngineConfig(max_running=2, context_length=256, max_step_tokens=64, block_size=32, device_check=False)
    for way, name in product(ways, names.split(",")):
        recipe = of_gpus(name)
        spec, checkpoint = random_model(recipe)
        device = open_device(rank) if on_cards else interpreter_device()
        place = RankPlace(rank, ranks, RankMemory(ranks, 0), _exchange)
        if on_cards:
            group: Any = (GPUGroup if way == "memory" else Calls)(place, device.torch_device)
        else:
            group = _Group(rank, ranks, folder / name if way == "memory" else None)
            (folder / name).mkdir(exist_ok=True)
        runner = Runner(
            CUDABackend(device=device, ranks=group), shard(spec, rank, ranks, checkpoint), checkpoint, config, "cuda"
        )
        np.save(folder / f"{name}-{way}-{rank}.npy", runner.logits(random_tokens(recipe, TOKENS), CHUNKS))
        runner.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5].split(","))
