"""`load_model` loads a model for a command, with progress on stderr."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from realizar.cli.options.chat_template import check_checkpoint_for_chat, check_name_for_chat
from realizar.cli.options.engine import DraftOptions, EngineOptions
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.progress import download_progress
from realizar.errors import InvalidRequestError
from realizar.gguf_names import kind_of

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
    from realizar.config import EngineConfig
    from realizar.engine.llm import LLM
    from realizar.hub.progress import Progress


def free_room() -> int:
    """As of `backends.select`, which is imported where it is asked."""
    from realizar.backends.select import free_room as asked

    return asked()


def fetch_model(model: str, *, mmproj: str = "auto", loads_with: EngineConfig | None = None) -> Checkpoint:
    """Open a model by its name, showing downloads on stderr; `mmproj` and errors as of `find_checkpoint`.

    With `loads_with` kernels are compiled beside a download, for a load that this process is to begin then.
    """
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve

    with download_progress() as shown:
        fetching = shown if loads_with is None else _Compiling(shown, loads_with)
        path = resolve(model, fetching, free_room, towers=mmproj == "auto")
        if isinstance(fetching, _Compiling):
            fetching.wait_begun()
        return open_checkpoint(path)


class _Compiling:
    """A `Progress` that has compilation begin with its first report, on a thread: the compiler's import takes long."""

    def __init__(self, shown: Progress, config: EngineConfig) -> None:
        self._shown, self._config = shown, config
        self._thread = threading.Thread(target=self._begin, daemon=True)
        self._lock = threading.Lock()

    def __call__(self, label: str, done: int, total: int | None) -> None:
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()
        self._shown(label, done, total)

    def wait_begun(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _begin(self) -> None:
        from realizar.backends.select import begin_compiling

        with suppress(Exception):  # the load says so too
            begin_compiling(self._config)


def with_drafter(config: EngineConfig) -> EngineConfig:
    """The same, with the path of a model that drafts in place of its name; errors as of `find_checkpoint`."""
    if config.draft_model is None:
        return config
    return replace(config, drafter=str(fetch_model(config.draft_model, mmproj="none").path.absolute()))


def check_for_several(config: EngineConfig) -> None:
    """InvalidRequestError: a configuration names what belongs to one model, and several are to have it."""
    if config.draft_model is not None:
        raise InvalidRequestError("--drafter names a model that drafts for a single one", "drafter")
    if config.mmproj not in ("auto", "none"):
        raise InvalidRequestError("--mmproj names an encoder of a single model's images", "mmproj")


def loaded_lines(llm: LLM, drafts: DraftOptions | None) -> list[str]:
    """What was chosen for a model that is loaded: its GPU, and a drafter of `auto`."""
    device = [f"device: {llm.device.label}"] if llm.device.kind == "cuda" else []
    is_auto = drafts is not None and drafts.drafter == "auto"
    return [*device, *(drafts_lines("auto", llm.drafter, llm.capacity.num_drafts) if is_auto else [])]


def drafts_lines(wanted: str, drafter: str, num_drafts: int) -> list[str]:
    """Who drafts, where anybody but the text does or `auto` was wanted; `drafter` is as of `DraftedModel.config`."""
    if num_drafts:
        beside = f"{Path(drafter).name}, which lies beside the model" if wanted == "auto" else drafter
        return [f"drafts: up to {num_drafts} by {_OWN_BLOCK if drafter == 'auto' else beside}"]
    return (
        [] if wanted != "auto" else ["drafts: by the text alone, as no drafter lies in the model's file or beside it"]
    )


_OWN_BLOCK = "the next-token block of the model's file"
_PLANNED_TENSORS = (
    *(".rope_freqs.weight", ".rope_factors_long.weight", ".rope_factors_short.weight"),
    *(".g_idx", ".weight_g_idx", ".weight_shape", ".d2t"),
)
_COMPARED_TENSORS = (".output.weight", ".token_embd.weight", ".lm_head.weight", ".embed_tokens.weight")
_COMPARED_BYTES = 64 << 10
"""Of a head and an embedding, which may be one and the same."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A checkpoint to plan with.

    Attributes:
        remote_bytes: of all files of a model that is not fetched, without what lies beside it; None if it is here.
        read_bytes: of those, what was read: headers, and the few tensors whose values a plan depends on. The values of
            all others are zeros.
    """

    checkpoint: Checkpoint
    remote_bytes: int | None = None
    read_bytes: int = 0


@contextmanager
def planned_model(
    model: str, *, mmproj: str = "auto", vocabulary: bool = False, drafter: bool = False
) -> Iterator[PlannedModel]:
    """Open a model by its name to plan for it; of one on a hub no more than headers, and the vocabulary, are fetched.

    With `drafter` the header of one that lies beside it is read too.

    Raises as `fetch_model`, and HubError where the hub does not give parts of files.
    """
    from realizar.hub.pull import find_unfetched

    found = find_unfetched(model, free_room, towers=mmproj == "auto")
    if found is None:
        yield PlannedModel(fetch_model(model, mmproj=mmproj))
        return
    from realizar.checkpoint.open import find_drafter_files, holds_header, open_checkpoint
    from realizar.hub.stand_in import StandIn

    name, listing = found
    files = [file for file in listing.files if drafter or kind_of(file.label) != "drafter" or file == listing.files[0]]
    own = [file for file in files if kind_of(file.label) == kind_of(files[0].label)]
    with tempfile.TemporaryDirectory(prefix="realizar-plan-") as folder:
        stand_in = StandIn(name, listing.commit, files, Path(folder))
        checkpoint = open_checkpoint(stand_in.read_headers(holds_header, vocabulary=vocabulary))
        beside = map(open_checkpoint, find_drafter_files(checkpoint))
        tensors = (tensor for each in (checkpoint, *beside) for tensor in each.tensors.values())
        stand_in.read([part for tensor in tensors for part in _read_by_plans(tensor)])
        size = sum(file.size_bytes or 0 for file in own)
        yield PlannedModel(checkpoint, size, stand_in.read_bytes)


def _read_by_plans(tensor: StoredTensor) -> Iterator[tuple[Path, int, int]]:
    """The bytes of a tensor that a plan depends on, by their offsets in its file."""
    name = f".{tensor.name}"
    size = tensor.size_bytes if name.endswith(_PLANNED_TENSORS) else 0
    if name.endswith(_COMPARED_TENSORS):
        size = min(tensor.size_bytes, _COMPARED_BYTES)
    if size:
        yield tensor.path, tensor.offset, tensor.offset + size


def load_model(
    model: str, options: EngineOptions, drafts: DraftOptions | None = None, *, chat: bool = False,
    template: str | None = None,
) -> LLM:  # fmt: skip
    """Load a model for one request at a time, showing downloads and compilation on stderr.

    `template` is the text of a chat template in place of the model's own. ChatTemplateError: one is missing for a chat;
    raised before the weights are loaded, and if possible before they are fetched.
    """
    config = (drafts or DraftOptions()).config(replace(options.config(), max_running=1))
    if chat and template is None:
        check_name_for_chat(model)
    checkpoint = fetch_model(model, mmproj=config.mmproj, loads_with=config)
    if chat and template is None:
        check_checkpoint_for_chat(model, checkpoint)
    config = with_drafter(config)
    with load_progress() as loading:
        from realizar.engine.llm import LLM

        return LLM(checkpoint, config=config, chat_template=template, load_progress=loading)
