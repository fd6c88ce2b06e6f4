"""Figures of an engine: of the moment, and counts since its start; those of one request are `outputs.Timings`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from realizar.outputs import added_by_place


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of an engine at one moment. Counts run from its start; `plus` goes on with them after a restart.

    Attributes:
        num_running, num_waiting: choices of requests, each counted alone.
        num_used_blocks, num_blocks: KV blocks, over all cache groups; a cached block is not used.
        kv_cache_bytes: that the KV cache may take. resident_bytes: memory of the engine's process, 0 where not known.
        num_preemptions: choices that gave up their blocks and were recomputed.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up, and found computed.
        num_snapshots, num_host_snapshots: of states, kept on the device and on the host now.
        snapshots_taken, and the like: copies of states, as in `SnapshotCounts`.
        blocks_saved, blocks_fetched: blocks and snapshots that were written to files, and read from there.
        num_drafts: times that drafts of a choice were verified. draft_tokens, accepted_tokens: tokens speculated, and
            those of them that were right. accepted_by_place: of the latter those that came first, second, and so on.
        num_steps: steps run. step_s: seconds spent in them.
        prompt_tokens, generation_tokens: tokens read and sampled.
        device_memory_used_bytes: of the GPU, by all programs. device_memory_total_bytes: all it has; both 0 on the CPU.
        num_restarts: engines that died and were replaced, counted by the supervisor; 0 in an engine's own figures.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    kv_cache_bytes: int = 0
    resident_bytes: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_snapshots: int = 0
    snapshots_taken: int = 0
    snapshots_restored: int = 0
    snapshots_dropped: int = 0
    num_host_snapshots: int = 0
    snapshots_stored: int = 0
    snapshots_fetched: int = 0
    blocks_saved: int = 0
    blocks_fetched: int = 0
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_place: tuple[int, ...] = ()
    num_steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    device_memory_used_bytes: int = 0
    device_memory_total_bytes: int = 0
    num_restarts: int = 0

    @property
    def kv_cache_usage(self) -> float:
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    def plus(self, earlier: EngineStats) -> EngineStats:
        """These figures with the counts of an engine that ended before this one started."""
        return replace(self.added(earlier), **{name: getattr(self, name) for name in _MOMENTARY})

    def added(self, other: EngineStats) -> EngineStats:
        places = added_by_place(self.accepted_by_place, other.accepted_by_place)
        numbers = [each.name for each in fields(self) if each.name != "accepted_by_place"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        return EngineStats(**sums, accepted_by_place=places)


_MOMENTARY = (
    *("num_running", "num_waiting", "num_used_blocks", "num_blocks", "kv_cache_bytes", "resident_bytes"),
    *("num_snapshots", "num_host_snapshots", "device_memory_used_bytes", "device_memory_total_bytes"),
)
