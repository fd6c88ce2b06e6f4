"""Options of `realizar bench-serve` for a load of mixed kinds of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import MaybeInteger
from realizar.errors import InvalidRequestError


@Parameter(name="*", group="Mix", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class MixOptions:
    """Options of a load of mixed kinds; `--mix`, `--mix-weights` or `--kind` asks for one.

    Attributes:
        mix: send kinds of requests mixed, of lengths as in a published trace, unless lengths are given.
        mix_weights: weights of kinds: greedy=2 json-schema=1; other kinds are then not sent.
        kind: send these kinds in turn, each alone; mix stands for all of them mixed.
        seconds: time of a mix, or of each kind; default as many requests as --requests says.
        leave: share of clients that leave before their answer is complete; default 0.25, or 0 with --kind.
        generators: processes that send the requests; default one for each four cores.
    """

    mix: bool = False
    mix_weights: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    kind: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    seconds: float | None = None
    leave: float | None = None
    generators: MaybeInteger = None

    @property
    def is_wanted(self) -> bool:
        """True if a mix, or kinds in turn, are asked for."""
        return self.mix or bool(self.mix_weights) or bool(self.kind)

    def check(self) -> None:
        """Check that the options belong together.

        Raises:
            InvalidRequestError: they do not.
        """
        if self.kind and (self.mix or self.mix_weights):
            raise InvalidRequestError("--kind sends kinds in turn, --mix sends them mixed: give one of them", "kind")
        for name in ("seconds", "leave", "generators"):
            if getattr(self, name) is not None and not self.is_wanted:
                raise InvalidRequestError(f"--{name} needs --mix or --kind", name)
