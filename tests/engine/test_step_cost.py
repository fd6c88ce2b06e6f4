"""What steps are reckoned to take: each part by a made-up GPU for which only that part takes time, and figures of the
log."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from realizar.backends.devices import THE_CPU, ChosenDevice
from realizar.backends.memory_plan import MemoryPlan
from realizar.engine.planned_cards import PlannedCards, advise
from realizar.engine.step_cost import H200, CardRates, ExpertParts, StepCost, expert_parts, rates_of
from realizar.models.generated.generate import generated_header
from realizar.models.registry import build_spec

_NOTHING = CardRates("made up", *[math.inf] * 4, *[0.0] * 4, math.inf)
_PLAN = MemoryPlan("cuda", 8_000_000, 0, 0, "bf16", 512.0, 0, 0, ())


def cost(rates: CardRates, shape: str = "tiny", ranks: int = 1, plan: MemoryPlan = _PLAN) -> StepCost:
    header = generated_header(shape)
    spec = build_spec(header, None, None)
    return StepCost(spec, plan, rates, ranks, expert_parts(spec, header, ranks))


def test_weights_keys_and_states_are_read() -> None:
    reads = replace(_NOTHING, read=1e6)
    assert cost(reads).decode_s(4, 1000) == pytest.approx(8 + 4 * 1000 * 512 / 1e6)
    assert cost(reads, ranks=2).decode_s(4, 1000) == pytest.approx(4 + 2 * 1000 * 512 / 1e6)
    assert cost(reads).prompt_s(100) == pytest.approx(8)
    states = replace(_PLAN, state_bytes=3_000_000)
    assert cost(reads, plan=states).decode_s(4, 0) == pytest.approx(8 + 2 * 4 * 3)


def test_windows_bound_what_attention_reads() -> None:
    found = cost(replace(_NOTHING, read=1e6), "tiny-window")
    assert {part.window for _, part in found.spec.attentions()} == {40}
    assert found.decode_s(1, 30) == pytest.approx(8 + 30 * 512 / 1e6)
    assert found.decode_s(1, 4000) == pytest.approx(8 + 40 * 512 / 1e6)


def test_experts_are_read_as_chance_has_it_and_by_parts_of_ranks() -> None:
    """2 of 8 experts of each token: a quarter of theirs, 4 MB in all, and 7/16 of them by two tokens."""
    reads = replace(_NOTHING, read=1e6)
    plan = replace(_PLAN, token_weight_bytes=5_000_000)
    assert cost(reads, "tiny-moe", plan=plan).decode_s(1, 0) == pytest.approx(5)
    assert cost(reads, "tiny-moe", plan=plan).decode_s(2, 0) == pytest.approx(4 + 4 * 7 / 16)
    assert cost(reads, "tiny-moe", plan=plan).prompt_s(1000) == pytest.approx(8)
    uneven = replace(cost(reads, "tiny-moe", 2, plan), experts=ExpertParts(0.75))
    assert uneven.prompt_s(1000) == pytest.approx(4 / 2 + 4 * 0.75)
    copied = replace(uneven, experts=ExpertParts(0.75, 1.25))
    assert copied.prompt_s(1000) == pytest.approx(4 / 2 + 4 / 1.25 * 0.75)


def test_matmuls_are_of_what_a_token_is_multiplied_with() -> None:
    matrices = 2 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512)
    head = 512 * 256
    multiplies = replace(_NOTHING, matmuls=1e6)
    norms = 5 * 256
    assert cost(multiplies).decode_s(3, 0) == pytest.approx(2 * 3 * (matrices + head + norms) / 1e6)
    assert cost(multiplies).prompt_s(100) == pytest.approx(2 * (100 * (matrices + norms) + head) / 1e6)
    experts = cost(replace(_NOTHING, expert_matmuls=1e6), "tiny-moe")
    assert experts.decode_s(1, 0) == pytest.approx(2 * 2 * 2 * 3 * 256 * 256 / 1e6)
    attends = cost(replace(_NOTHING, attention_matmuls=1e6))
    assert attends.prompt_s(100) == pytest.approx(2 * 4 * 256 * 100 * 100 / 2 / 1e6)


def test_launches_are_of_layers_by_their_kinds() -> None:
    launches = replace(_NOTHING, layer_s=1.0, mixture_s=0.25, state_s=0.125)
    assert cost(launches).decode_s(7, 0) == 2
    assert cost(launches, "tiny-moe").decode_s(7, 0) == 2.5
    assert cost(launches, "tiny-delta").prompt_s(7) == 4 + 3 * 0.125


def test_sums_of_ranks_are_of_all_branches_and_the_embedding() -> None:
    sums = replace(_NOTHING, sum_s=1.0)
    assert cost(sums).decode_s(1, 0) == 0
    assert cost(sums, ranks=2).decode_s(1, 0) == 5
    sends = replace(_NOTHING, sent=1e6)
    assert cost(sends, ranks=2).decode_s(3, 0) == pytest.approx((5 * 3 * 256 * 4 + 3 * 512 * 4 / 2) / 1e6)
    assert cost(sends, ranks=2).prompt_s(300) == pytest.approx((5 * 300 * 256 * 2 + 512 * 4 / 2) / 1e6)
    assert cost(sends, ranks=4).decode_s(3, 0) == pytest.approx((1.5 * 5 * 3 * 256 * 4 + 3 * 512 * 4 * 3 / 4) / 1e6)


_8B = MemoryPlan("cuda", 5_073_497_936, 0, 0, "bf16", 131072.0, 0, 0, ())
_30B = replace(_8B, weight_bytes=20_223_883_544, kv_bytes_per_token=98304.0, token_weight_bytes=2_103_200_024)


@pytest.mark.parametrize(
    ("shape", "plan", "ranks", "one", "many", "prompt"),
    [
        ("llama-8b", _8B, 1, 660, 20537, 39730),
        ("llama-8b", _8B, 2, 866, 28861, 65637),
        ("qwen3-30b-a3b", _30B, 1, 762, 8964, 44550),
    ],
)
def test_measured_steps_are_within_a_fifth(
    shape: str, plan: MemoryPlan, ranks: int, one: float, many: float, prompt: float
) -> None:
    """Tokens/s of docs/log/ranks.md and docs/log/cuda-engine.md."""
    reckoned = cost(H200, shape, ranks, plan)
    assert reckoned.is_reckoned
    assert 1 / reckoned.decode_s(1, 192) == pytest.approx(one, rel=0.2)
    assert 64 / reckoned.decode_s(64, 192) == pytest.approx(many, rel=0.2)
    assert 2048 / reckoned.prompt_s(2048) == pytest.approx(prompt, rel=0.2)


def test_small_experts_in_uneven_parts_are_slower_on_two_gpus_at_one_row() -> None:
    alone, together = (cost(H200, "qwen3-30b-a3b", ranks, _30B) for ranks in (1, 2))
    assert together.experts == ExpertParts(2 / 3, 1)
    assert cost(H200, "qwen3-30b-a3b", 4, _30B).experts == ExpertParts(1 / 3, 4 / 3)
    assert together.decode_s(1, 192) > alone.decode_s(1, 192)
    assert together.decode_s(64, 192) < alone.decode_s(64, 192)


def test_only_cards_that_were_measured_have_rates() -> None:
    assert rates_of(ChosenDevice("cuda", 1, "NVIDIA H200", (9, 0))) is H200
    assert rates_of(ChosenDevice("cuda", capability=(9, 0))) is H200, "planned for, and not there"
    assert rates_of(ChosenDevice("cuda", 0, "NVIDIA GeForce RTX 4090", (8, 9))) is None
    assert rates_of(THE_CPU) is None
    assert not cost(H200).is_reckoned


def _cards(gpus: int, one: float, many: float, together: float) -> PlannedCards:
    return PlannedCards(gpus, None, 4096, 9, one, many, together, 1.0)


@pytest.mark.parametrize(
    ("pair", "advised"),
    [
        ((600, 9000, 800, 17000), True),
        ((800, 9000, 700, 20000), True),
        ((600, 9000, 800, 20000), False),
    ],
    ids=["more in all", "one sooner", "neither"],
)
def test_replicas_are_advised_where_they_are_reckoned_to_serve_more(
    pair: tuple[float, float, float, float], *, advised: bool
) -> None:
    alone, two = _cards(1, pair[0], pair[1], pair[1]), _cards(2, pair[2], 1.0, pair[3])
    advice = advise((alone, two), 2)
    assert (advice is not None) == advised
    if advice is not None:
        assert f"--replicas 2 would write a text alone at {pair[0]} tokens/s, not {pair[2]}, and 128 texts" in advice
        assert advice.endswith(f" at {2 * pair[1]:,}, not {pair[3]:,}")
    assert advise((alone, two), 1) is None


def test_more_gpus_are_advised_where_fewer_have_no_room() -> None:
    none = PlannedCards(1)
    cards = (none, replace(none, gpus=2, reason="heads"), _cards(4, 1.0, 1.0, 1.0))
    assert advise(cards, 1) == "4 GPUs have room for the model together: --tensor-parallel 4"
    assert advise(cards, 4) is None
    assert advise((none,), 1) is None
