"""A run against peers as a Markdown table and as plain data. Standard library only."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from peers.compare import IK, IK_REPACKED, LLAMACPP, OURS, PeerResults, Row


def as_record(results: PeerResults) -> dict[str, Any]:
    """Everything measured and derived, for JSON."""
    rows = [
        {
            **asdict(row),
            "ratios": {
                "prefill_llama_cpp": row.ratio(row.prefill, LLAMACPP),
                "decode_llama_cpp": row.ratio(row.decode, LLAMACPP),
                "prefill_ik_llama_cpp": row.best_ik(row.prefill),
                "decode_ik_llama_cpp": row.best_ik(row.decode),
            },
            "achieved_gb_per_s": row.achieved_gb_per_s(OURS),
            "share_of_limit": row.share_of_limit(),
        }
        for row in results.rows
    ]
    return {
        "machine": asdict(results.machine),
        "work": asdict(results.work),
        "rounds": results.rounds,
        "rows": rows,
        "failures": list(results.failures),
    }


def as_markdown(results: PeerResults) -> str:
    """Two tables, decode and prefill, with the machine and the workload above them."""
    work, machine = results.work, results.machine
    forced = f" realizar held to {work.instruction_set}." if work.instruction_set else ""
    place = f"{machine.processor}, {machine.physical_cores} physical cores"
    lines = [
        f"{place}; tokens/s, medians of {results.rounds} rounds.{forced}",
        "",
        f"Decode of {work.gen_tokens} tokens after {work.prompt_tokens}; the limit is what reading threads reach:",
        "",
        "| model | threads | llama.cpp | ik_llama.cpp | realizar | to llama.cpp | to ik | GB/s | limit | share |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_decode_line(row) for row in results.rows),
        "",
        f"Prefill of {work.prompt_tokens} tokens:",
        "",
        "| model | threads | llama.cpp | ik_llama.cpp | realizar | to llama.cpp | to ik |",
        "|---|---|---|---|---|---|---|",
        *(_cells(_phase(row, row.prefill)) for row in results.rows),
    ]
    if results.failures:
        lines += ["", *(f"- failed: {failure}" for failure in results.failures)]
    return "\n".join(lines)


def _decode_line(row: Row) -> str:
    share = row.share_of_limit()
    cells = (
        _number(row.achieved_gb_per_s(OURS)),
        _number(row.limit_gb_per_s),
        "-" if share is None else f"{share:.0%}",
    )
    return _cells([*_phase(row, row.decode), *cells])


def _phase(row: Row, phase: dict[str, float]) -> list[str]:
    ik = max((phase[name] for name in (IK, IK_REPACKED) if name in phase), default=None)
    speeds = [_number(phase.get(LLAMACPP)), _number(ik), _number(phase.get(OURS))]
    return [row.model, str(row.threads), *speeds, _times(row.ratio(phase, LLAMACPP)), _times(row.best_ik(phase))]


def _cells(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
