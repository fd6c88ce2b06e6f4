"""`joint_info`: facts of several engines of one model, as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from realizar.engine.process.messages import EngineInfo


def joint_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What engines can do together: a request fits the smallest of them, and their rows and memory add up.

    Args:
        infos: of one engine at least.
    """
    first = infos[0]
    capacity = replace(
        first.capacity,
        num_blocks=tuple(sum(counts) for counts in zip(*(each.capacity.num_blocks for each in infos), strict=True)),
        weight_bytes=sum(each.capacity.weight_bytes for each in infos),
        kv_cache_bytes=sum(each.capacity.kv_cache_bytes for each in infos),
        load_s=max(each.capacity.load_s for each in infos),
    )
    return msgspec.structs.replace(
        first,
        context_length=min(each.context_length for each in infos),
        max_request_tokens=min(each.max_request_tokens for each in infos),
        max_running=sum(each.max_running for each in infos),
        queue_length=sum(each.queue_length for each in infos),
        threads=sum(each.threads for each in infos),
        capacity=capacity,
        device_label=", ".join(dict.fromkeys(each.device_label for each in infos)),
    )
