"""`load_model` loads a model for a command, with progress on stderr; `EngineOptions` are the shared options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import DeviceName, MaybeInteger
from realizar.cli.options.chat_template import check_checkpoint_for_chat, check_name_for_chat
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.progress import download_progress
from realizar.config import EngineConfig, KVCacheDType

if TYPE_CHECKING:
    from realizar.engine.llm import LLM


@Parameter(name="*", group="Engine", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine's options, which become an `EngineConfig`.

    Attributes:
        threads: CPU threads; default the physical cores.
        context_length: tokens that prompt and answer may take together; default the model's.
        kv_cache_dtype: element type of the KV cache.
        instruction_set: CPU instruction set to force; `realizar doctor` lists them.
        device: where to run: cpu, cuda, or cuda:1 for the second GPU; auto is a GPU that can run it, else the CPU.
        batch_invariant: on a GPU, quantised products and decodes alike in every batch; the CPU always gives same bits.
        fp8_copies: on a GPU, FP8 from 128 tokens a step on: about 3.7 % error a product, a byte a weight more.
        no_graphs: on a GPU, launch every kernel by itself in place of capturing steps as graphs.
    """

    device: DeviceName = "auto"
    batch_invariant: bool = False
    fp8_copies: bool = False
    threads: Annotated[MaybeInteger, Parameter(name=("--threads", "-t"))] = None
    no_graphs: bool = False
    context_length: Annotated[
        MaybeInteger, Parameter(name=("--context-length", "--ctx-size", "--max-model-len", "-c"))
    ] = None
    kv_cache_dtype: Annotated[KVCacheDType, Parameter(name="--kv-cache-dtype")] = "auto"
    instruction_set: str | None = None

    def config(self, *, max_running: int | None) -> EngineConfig:
        """The configuration of an engine that runs so many requests at once; None takes what suits the device."""
        return EngineConfig(
            device=self.device,
            batch_invariant=self.batch_invariant,
            fp8_copies=self.fp8_copies,
            graphs=not self.no_graphs,
            threads=self.threads,
            context_length=self.context_length,
            kv_cache_dtype=self.kv_cache_dtype,
            instruction_set=self.instruction_set,
            max_running=max_running,
        )


@dataclass(frozen=True, slots=True)
class ForChat:
    """Marks that a model is loaded for a chat.

    Attributes:
        template: text of a template that replaces the model's own.
    """

    template: str | None = None


def load_model(model: str, options: EngineOptions, *, max_running: int = 1, chat: ForChat | None = None) -> LLM:
    """Load a model, showing downloads and compilation on stderr.

    Args:
        chat: None if no chat template is needed.

    Raises:
        ChatTemplateError: a template is needed and missing; raised before the weights are loaded, and if possible
            before they are fetched.
    """
    config = options.config(max_running=max_running)
    if chat is not None and chat.template is None:
        check_name_for_chat(model)
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve

    with download_progress() as fetching:
        checkpoint = open_checkpoint(resolve(model, fetching))
    if chat is not None and chat.template is None:
        check_checkpoint_for_chat(model, checkpoint)
    with load_progress() as loading:
        from realizar.engine.llm import LLM

        return LLM(
            checkpoint,
            config=config,
            chat_template=None if chat is None else chat.template,
            load_progress=loading,
        )
