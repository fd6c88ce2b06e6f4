"""The CUDA kernels that sample, beside the host's sampler with the same numbers, and beside exact distributions."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from backends.cuda.sampling.sampled_steps import SampledSteps  # noqa: E402
from backends.reference_sampler import philox, truncation  # noqa: E402
from backends.reference_sampler.logprobs import token_logprobs  # noqa: E402
from realizar.backends.cuda.sampling.native_step_sampler import SharedMasks  # noqa: E402
from realizar.backends.row_masks import RowMasks  # noqa: E402
from realizar.batch import LogprobQuery  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
from realizar.structured.workers.mask_memory import MaskMemory  # noqa: E402
from step_inputs import scheduled_row  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 60.0},
    "cold": {"temperature": 0.01},
    "top_k": {"top_k": 40},
    "top_k_1": {"top_k": 1},
    "top_k_large": {"top_k": 5000},
    "top_k_all": {"top_k": 1 << 30},
    "top_p": {"top_p": 0.9},
    "top_p_tiny": {"top_p": 1e-6},
    "top_p_hot": {"top_p": 0.95, "temperature": 20.0},
    "min_p": {"min_p": 0.02},
    "min_p_1": {"min_p": 1.0},
    "typical": {"typical_p": 0.6},
    "typical_cold": {"temperature": 0.05, "typical_p": 0.95},
    "typical_hot": {"temperature": 60.0, "typical_p": 0.5},
    "typical_top_p": {"temperature": 0.8, "typical_p": 0.95, "top_p": 0.8},
    "typical_min_p": {"typical_p": 0.9, "min_p": 0.01},
    "typical_top_k": {"typical_p": 0.9, "top_k": 200},
    "typical_sigma": {"typical_p": 0.9, "top_n_sigma": 2.0},
    "typical_bias": {"typical_p": 0.9, "logit_bias": {3: 5.0, 7: -100.0, 90: 2.5}},
    "sigma": {"top_n_sigma": 1.3},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.002},
    "xtc_top_k": {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 20},
    "mirostat": {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.4},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "most": {"top_k": 300, "top_n_sigma": 3.0, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01, "xtc_probability": 0.5,
             "xtc_threshold": 0.01},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"temperature": 0.9, "top_p": 0.8, "logit_bias": {3: 5.0, 7: -100.0, 90: 2.5}},
    "dry": {"temperature": 0.9, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": (5, 9)},
    "greedy": {"temperature": 0.0},
    "greedy_penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 3},
    "greedy_min_tokens": {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (1, 2, 3)},
}  # fmt: skip


def random_logits(rows: int, vocab: int, seed: int, spread: float = 2.5) -> Any:
    """Normal logits, some forbidden; ids below 12 are likely, so that rows repeat themselves."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((rows, vocab), generator=generator) * spread
    values[:, :12] += 2.0 * spread
    values[torch.rand((rows, vocab), generator=generator) < 0.01] = -math.inf
    return values


@pytest.mark.parametrize("vocab", [97, 4096, 50_001, 151_936])
@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_the_hosts(kind: str, vocab: int) -> None:
    """All but those within 1e-6 of where another id begins; there the states would part, so the row reopens."""
    rows, steps = 48, 6
    options = KINDS[kind]
    native, reference = (SampledSteps(rows, vocab, on_host=on_host) for on_host in (False, True))
    lengths, histories = [9] * rows, [np.random.default_rng(row).integers(0, 12, 9).tolist() for row in range(rows)]
    for row in range(rows):
        for each in (native, reference):
            each.open(row, SamplingParams(seed=row, **options), histories[row], choice=row % 3)
    different = 0
    for step in range(steps):
        logits = random_logits(rows, vocab, step)
        scheduled = [scheduled_row(row, (1,), lengths[row] - 1, True) for row in range(rows)]
        found, wanted = (each.step(scheduled, logits) for each in (native, reference))
        for row, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert (one.error, other.error) == (None, None)
            histories[row].append(other.token_ids[0])
            lengths[row] += 1
            if one.token_ids == other.token_ids:
                for mine, exact in zip(one.logprobs, other.logprobs, strict=True):
                    assert (mine.token_id, mine.rank) == (exact.token_id, exact.rank)
                    assert mine.logprob == pytest.approx(exact.logprob, abs=2e-6)
                continue
            different += 1
            for each in (native, reference):
                each.maker.close(row)
                each.open(row, SamplingParams(seed=row, **options), histories[row], choice=row % 3)
    assert different <= (options.get("temperature") != 0.0), kind


@pytest.mark.parametrize("kind", ["temperature", "top_p", "min_p", "top_k", "xtc_top_k"])
def test_numbers_at_which_tokens_change(kind: str) -> None:
    """Each token's number lies where the exact shares say, to 1e-6: 4,000 numbers, in 16 rows of 128,256 logits."""
    vocab, rows = 128_256, 16
    sampling = SamplingParams(seed=4, **KINDS[kind])
    native = SampledSteps(rows, vocab)
    logits = random_logits(1, vocab, 3).expand(rows, -1).contiguous()
    these = truncation.truncate(logits[0].numpy(), sampling)
    if sampling.xtc_probability:
        these = truncation.exclude_top_choices(these, sampling.xtc_threshold)
    shares = np.bincount(these.ids, these.weights, vocab).cumsum() / these.weights.sum()
    for row in range(rows):
        native.open(row, sampling, [1, 2, 3], choice=row)
    for position in range(3, 253):
        scheduled = [scheduled_row(row, (1,), position - 1, True) for row in range(rows)]
        for row, output in enumerate(native.step(scheduled, logits)):
            (token_id,) = output.token_ids
            number = philox.uniform(4, row, position, philox.DRAW_TOKEN)
            low = shares[token_id - 1] if token_id else 0.0
            assert low - 1e-6 <= number < shares[token_id] + 1e-6, (row, position, token_id)
            assert shares[token_id] > low, "an id that was to be left out"


@pytest.mark.parametrize("vocab", [97, 20_000])
@pytest.mark.parametrize(
    "options", [{"top_k": 50}, {"top_p": 0.3}, {"top_k": 9000, "top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.3}]
)
def test_equal_logits_stay_in_the_order_of_ids(vocab: int, options: dict[str, Any]) -> None:
    """More equal logits than are sorted at once: the ids that stay are the lowest."""
    rows = 64
    native = SampledSteps(rows, vocab)
    sampling = SamplingParams(seed=2, **options)
    kept = min(sampling.top_k or vocab, vocab) * sampling.top_p * sampling.typical_p
    for row in range(rows):
        native.open(row, sampling, [1], choice=row)
    outputs = native.step([scheduled_row(row, (1,), 0, True) for row in range(rows)], torch.zeros((rows, vocab)))
    for row, output in enumerate(outputs):
        number = philox.uniform(2, row, 1, philox.DRAW_TOKEN)
        assert output.token_ids[0] == pytest.approx(math.floor(number * math.ceil(kept)), abs=1)
        assert output.token_ids[0] < math.ceil(kept)


@pytest.mark.parametrize("rows", [1, 256])
def test_each_row_by_its_own_parameters(rows: int) -> None:
    """All kinds in one step, and a row alone: the same tokens."""
    vocab, names = 30_011, list(KINDS)
    logits = random_logits(256, vocab, 5)
    together, alone = SampledSteps(256, vocab), SampledSteps(1, vocab)
    samplings = [SamplingParams(seed=row, **KINDS[names[row % len(names)]]) for row in range(256)]
    for row in range(256):
        together.open(row, samplings[row], [3, 4, 3, 4], prompt=2)
    found = together.step([scheduled_row(row, (1,), 3, True) for row in range(256)], logits)
    for row in range(256) if rows == 256 else range(1):
        alone.open(0, samplings[row], [3, 4, 3, 4], prompt=2)
        (output,) = alone.step([scheduled_row(0, (1,), 3, True)], logits[row : row + 1])
        assert output.token_ids == found[row].token_ids, samplings[row]
        assert output.logprobs == found[row].logprobs
        alone.maker.close(0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_not_finite(kind: str, value: float) -> None:
    """The row's error, and its neighbours are well."""
    native = SampledSteps(3, 5000)
    logits = random_logits(3, 5000, 1)
    if math.isinf(value) and value < 0:
        logits[1] = value
    else:
        logits[1, 4500] = value
    for row in range(3):
        native.open(row, SamplingParams(seed=1, **KINDS[kind]), [1, 2, 3, 4], prompt=1)
    first, failed, last = native.step([scheduled_row(row, (1,), 3, True) for row in range(3)], logits)
    assert first.token_ids
    assert last.token_ids
    assert failed.error is not None


def test_a_mask_that_leaves_little() -> None:
    """With min_tokens the end stays allowed where the mask allows nothing else; nothing allowed is the row's error."""
    vocab = 5000
    native = SampledSteps(4, vocab)
    logits = random_logits(4, vocab, 4)
    logits[:, [17, 40, 4990]] = torch.tensor([3.0, 5.0, 1.0])
    late = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(40,))
    for row, sampling in enumerate((SamplingParams(temperature=0), late, late, SamplingParams(seed=1))):
        native.open(row, sampling, [1])
    masks = {}
    for row, allowed in enumerate(((17, 4990), (17, 40), (40,), ())):
        bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
        bits[list(allowed)] = 1
        masks[row] = np.packbits(bits, bitorder="little").view(np.uint32)
    outputs = native.step([scheduled_row(row, (1,), 0, True) for row in range(4)], logits, masks)
    assert [output.token_ids for output in outputs] == [(17,), (17,), (40,), ()]
    assert outputs[3].error is not None
    assert "grammar" in outputs[3].error.message


@pytest.mark.parametrize("vocab", [97, 20_000, 151_936])
def test_logprobs_of_queries(vocab: int) -> None:
    """Targets and lists of several lengths; a list longer than the kernel's comes from torch."""
    native = SampledSteps(8, vocab)
    logits = random_logits(8, vocab, 6)
    logits[2] = torch.round(logits[2])  # ties
    top = (0, 1, 5, 20, 500, 4096, 5000, vocab)
    queries = tuple(LogprobQuery(index, None if index == 1 else index * 7, n) for index, n in enumerate(top))
    row = scheduled_row(0, range(8), 0, False, logprob_queries=queries)
    (output,) = native.step([row], logits)
    for found, query, values in zip(output.queried, queries, logits.numpy(), strict=True):
        exact = token_logprobs(values, query.target, min(query.top_n, vocab))
        assert (found.token_id, found.rank) == (exact.token_id, exact.rank)
        assert found.logprob == pytest.approx(exact.logprob, abs=2e-6)
        assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in exact.top]
        assert [value for _, value in found.top] == pytest.approx([value for _, value in exact.top], abs=2e-6)


@pytest.mark.parametrize("vocab", [97, 20_000, 151_936])
def test_logprobs_of_logits_that_crowd(vocab: int) -> None:
    """All logits alike, many tied with the largest, all large ones beside each other, and few that are finite."""
    native = SampledSteps(8, vocab)
    logits = random_logits(8, vocab, 6)
    logits[0] = 1.0
    logits[1, vocab // 3 :] = 9.0
    logits[2], logits[3] = torch.linspace(5, -5, vocab), torch.linspace(-5, 5, vocab)
    logits[4] = -math.inf
    logits[4, vocab // 2 : vocab // 2 + 3] = torch.tensor([-1.0, 2.0, 0.5])
    logits[5, : vocab // 2] += 20.0
    logits[6] = torch.where(logits[6] < 0, -0.0, 0.0)
    logits[7, ::64] += 8.0
    for top_n in (1, 2, 5, 20, 40):
        queries = tuple(LogprobQuery(index, (index * 11) % vocab, top_n) for index in range(8))
        (output,) = native.step([scheduled_row(0, range(8), 0, False, logprob_queries=queries)], logits)
        for found, query, values in zip(output.queried, queries, logits.numpy(), strict=True):
            exact = token_logprobs(values, query.target, top_n)
            assert (found.token_id, found.rank) == (exact.token_id, exact.rank)
            assert found.logprob == pytest.approx(exact.logprob, abs=2e-6)
            assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in exact.top]
            assert [value for _, value in found.top] == pytest.approx([value for _, value in exact.top], abs=2e-6)


def test_graphs_choose_what_launches_do() -> None:
    """Steps of decodes of each kind and of all kinds, of few and all rows: the same tokens, list and state of rows."""
    vocab, rows, names = 20_011, 40, list(KINDS)
    graphs, launches = SampledSteps(rows, vocab, graphs=True), SampledSteps(rows, vocab)
    replayed: list[int] = []
    found_graph = graphs.maker._graphs.find

    def find(count: int, flags: int) -> Any:
        replayed.append(flags)
        return found_graph(count, flags)

    graphs.maker._graphs.find = find
    kinds = [[name] * 5 for name in names] + [names * 2, names[:1], names[-1:] + names]
    for number, group in enumerate(kinds):
        numbers = np.random.default_rng(number).permutation(rows)[: len(group)].tolist()
        histories = [np.random.default_rng(row).integers(0, 12, 9).tolist() for row in numbers]
        for row, kind, history in zip(numbers, group, histories, strict=False):
            for each in (graphs, launches):
                each.open(row, SamplingParams(seed=row, **KINDS[kind]), history)
        for step in range(6):
            logits = random_logits(len(numbers), vocab, 100 * number + step)
            length = [9 + step] * len(numbers)
            one, other = (each.decode(numbers, length, logits) for each in (graphs, launches))
            assert one == other, group
        for row in numbers:
            for each in (graphs, launches):
                each.maker.close(row)
    assert len({flags & 39 for flags in replayed}) == 7  # sets of kernels


def test_graphs_choose_in_steps_that_read_prompts_what_launches_do() -> None:
    """Where all rows sample, whether they read a prompt or decode; launches where a prompt goes on."""
    vocab, rows = 5003, 20
    graphs, launches = SampledSteps(rows, vocab, graphs=True), SampledSteps(rows, vocab)
    replayed: list[int] = []
    found_graph = graphs.maker._graphs.find

    def find(count: int, flags: int) -> Any:
        replayed.append(count)
        return found_graph(count, flags)

    graphs.maker._graphs.find = find
    kinds = [KINDS[name] for name in KINDS]
    for number in range(6):
        order = np.random.default_rng(number).permutation(rows).tolist()
        for row in order:
            for each in (graphs, launches):
                each.open(row, SamplingParams(seed=row, **kinds[(row + 7 * number) % len(kinds)]), [1, 2, 3])
        goes_on = order[0] if number % 3 == 2 else None
        steps = [
            scheduled_row(row, range(1, 1 + count), 3 - count, row != goes_on)
            for row, count in zip(order, [2 + number % 2, 1, 3] * rows, strict=False)
        ]
        one, other = (
            each.step(steps, random_logits(rows - (goes_on is not None), vocab, number)) for each in (graphs, launches)
        )
        assert one == other
        for row in order:
            for each in (graphs, launches):
                each.maker.close(row)
    assert replayed == [rows] * 4


def test_graphs_choose_within_masks_what_launches_do() -> None:
    """Steps in which rows have masks or none, some are deferred, and steps between them without masks."""
    vocab, rows, words = 20_011, 24, 626
    graphs, launches = SampledSteps(rows, vocab, graphs=True), SampledSteps(rows, vocab)
    rng = np.random.default_rng(7)
    memories = [MaskMemory(words, 2 * rows, 0) for _ in range(2)]  # each is locked by one of both
    replayed: list[int] = []
    found_graph = graphs.maker._graphs.find

    def find(count: int, flags: int) -> Any:
        replayed.append(count)
        return found_graph(count, flags)

    graphs.maker._graphs.find = find
    kinds = [KINDS[name] for name in KINDS]
    for row in range(rows):
        structured = StructuredOutput("regex", "a") if row % 3 else None
        for each in (graphs, launches):
            each.open(row, SamplingParams(seed=row, structured=structured, **kinds[row % len(kinds)]), [1, 2, 3])
    lengths = np.full(rows, 3)
    for step in range(30):
        numbers = sorted(rng.permutation(rows)[: (rows, 9, 2)[step % 3]].tolist())
        logits = random_logits(len(numbers), vocab, step)
        masks = rng.integers(0, 1 << 32, (2 * rows, words), np.uint32)
        masked = [row for row in numbers if row % 3] if step % 5 else []
        deferred = [row for row in masked if rng.random() < 0.2]
        given = np.array([row for row in masked if row not in deferred], np.intp)
        places = rng.permutation(2 * rows)[: len(given)]
        found = []
        for each, memory in zip((graphs, launches), memories, strict=True):
            memory.masks[:] = masks
            row_masks = RowMasks(given, places, memory.masks, {})
            found.append(each.decode(numbers, lengths[numbers].tolist(), logits, row_masks, deferred))
        assert found[0] == found[1]
        for row, output in zip(numbers, found[0], strict=True):
            assert len(output.token_ids) == (row not in deferred)
            if row in given.tolist():
                (token_id,), mask = output.token_ids, masks[places[given.tolist().index(row)]]
                assert mask[token_id // 32] >> np.uint32(token_id % 32) & 1
        lengths[[row for row in numbers if row not in deferred]] += 1
    assert len(replayed) == 30
    for each, memory in zip((graphs, launches), memories, strict=True):
        each.maker.release()
        memory.close()


def test_graphs_of_logprobs_find_what_launches_do() -> None:
    """Lists of several lengths, rows that want none, and rows that change from step to step, in steps of all kinds."""
    vocab, rows = 20_011, 40
    graphs, launches = SampledSteps(rows, vocab, graphs=True), SampledSteps(rows, vocab)
    rng = np.random.default_rng(3)
    for row in range(rows):
        sampling = SamplingParams(seed=row, temperature=row % 2, logprobs=(None, 0, 3, 20)[row % 4])
        for each in (graphs, launches):
            each.open(row, sampling, [1, 2, 3])
    for number in range(12):
        numbers = (
            sorted(rng.permutation(rows)[: (40, 17, 3, 1)[number % 4]].tolist()) if number % 3 else list(range(rows))
        )
        logits = random_logits(len(numbers), vocab, number)
        steps = [scheduled_row(row, (1,), 2, True) for row in numbers]
        if number % 2:
            one, other = (each.step(steps, logits) for each in (graphs, launches))
        else:
            one, other = (each.decode(numbers, [3] * len(numbers), logits) for each in (graphs, launches))
        assert one == other
        assert any(output.logprobs for output in one) or len(numbers) == 1


def test_graphs_of_rows_whose_logits_can_not_be_used() -> None:
    native = SampledSteps(3, 5000, graphs=True)
    logits = random_logits(3, 5000, 1)
    logits[1, 4500] = math.nan
    for row in range(3):
        native.open(row, SamplingParams(seed=1, top_p=0.9), [1, 2, 3, 4], prompt=1)
    first, failed, last = native.decode([0, 1, 2], [4, 4, 4], logits)
    assert first.token_ids
    assert last.token_ids
    assert failed.error is not None


def test_pages_that_can_not_be_locked_leave_no_error() -> None:
    """Those that another engine of the process has locked: masks are then sent, and torch finds nothing amiss."""
    pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    table = np.frombuffer(pages, np.uint32).reshape(4, -1)
    torch.zeros(1, device="cuda")  # the device has a context, as where a model is loaded
    first, second = SharedMasks(), SharedMasks()
    assert first.address(table) is not None
    assert second.address(table) is None
    assert int(torch.ones(3, device="cuda").sum()) == 3
    first.release()
    assert second.address(table) is None  # it asks once
    second.release()
    assert second.address(table) is not None
    second.release()
    torch.cuda.synchronize()
