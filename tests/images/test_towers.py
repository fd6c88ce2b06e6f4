"""Towers and whole models that see give what transformers gives, from safetensors and from GGUF files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.core.core_runs import run
from gguf_conversion import convert_to_gguf
from images.tower_files import write_tower_file
from images.vision_kinds import IMAGE, KINDS, LFM2_PREPARED, MERGE, PATCH, SOFT_TOKENS, TILE
from images.vision_models import (
    LFM2_GRIDS,
    SIZES,
    VisionModel,
    build_vision_model,
    image_of,
    in_float32,
    write_vision_files,
)
from images.vision_prompts import CONVERSATIONS, as_image, expected, features, logprobs, patches
from realizar.backends.cpu.tower import CPUTower
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.images import open_images
from realizar.engine.llm import LLM
from realizar.engine.loading import load_core
from realizar.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from realizar.images.prepare import (
    PixelBounds,
    bounded,
    cut_of,
    largest_image,
    layout_of,
    read_bounds,
    with_low_detail,
    with_most_tokens,
)
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec, build_tower
from realizar.models.tower import Budgeted, Fitted, Stretched, Tiles, Tower, Whole
from realizar.models.towers.find import find_tower
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.load import load_tokenizer

torch = pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")
Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")


@pytest.fixture(scope="module", params=[*KINDS])
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return build_vision_model(request.param, tmp_path_factory.mktemp("vision"))


def tower_of(checkpoint: Checkpoint) -> Tower:
    tower = build_tower(checkpoint)
    assert tower is not None
    return tower


def as_pixels(tower: Tower, patches: NDArray[np.float32]) -> NDArray[np.float32]:
    """Patches [rows, columns, ...] as transformers' pixel values [3, height, width]."""
    rows, columns, _ = patches.shape
    size = tower.patch_size
    grid = patches.reshape(rows, columns, 3, size, size).transpose(2, 0, 3, 1, 4)
    return grid.reshape(3, rows * size, columns * size)


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_the_processor(vision: VisionModel, size: tuple[int, int]) -> None:
    tower, found = tower_of(open_checkpoint(vision.path)), vision.prepared([as_image(size)])
    pictures = patches(tower, size)
    if vision.gives_patches:
        (only,) = pictures
        squares = only.reshape(only.shape[0] // MERGE, MERGE, only.shape[1] // MERGE, MERGE, -1).swapaxes(1, 2)
        np.testing.assert_array_equal(squares.reshape(-1, only.shape[2]), found["pixel_values"].numpy())
        return
    if vision.kind == "lfm2_vl":
        _check_lfm2_pictures(tower, pictures, size)
        return
    if vision.kind == "gemma4":  # its processor gives patches as well, and the model takes one half away
        squares = pictures[0].reshape(-1, 3 * PATCH**2)
        np.testing.assert_array_equal(squares, 2 * (found["pixel_values"][0, : len(squares)].numpy() - 0.5))
        assert not found["pixel_values"][0, len(squares) :].any()
        return
    wanted = found["pixel_values"].flatten(0, -4).numpy()
    np.testing.assert_array_equal([as_pixels(tower, each) for each in pictures], wanted)


def _check_lfm2_pictures(tower: Tower, pictures: list[NDArray[np.float32]], size: tuple[int, int]) -> None:
    """They have the processor's sizes, and are near its pixels, which torchvision resizes, where that is installed."""
    rows, columns, whole = LFM2_GRIDS[size]
    tiles = 0 if rows * columns == 1 else rows * columns
    assert [each.shape[:2] for each in pictures[:-1]] == [(TILE // PATCH, TILE // PATCH)] * tiles
    assert pictures[-1].shape[:2] == tuple(edge // PATCH for edge in whole)
    pytest.importorskip("torchvision", reason="the pixels to compare with need torchvision")
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    found = Lfm2VlImageProcessor(**LFM2_PREPARED)([as_image(size)], return_tensors="pt")
    assert found["spatial_shapes"].tolist() == [list(each.shape[:2]) for each in pictures]
    for each, wanted in zip(pictures, found["pixel_values"].numpy(), strict=True):
        own = each.reshape(-1, each.shape[2])
        off = np.abs(own - wanted[: len(own)]) * 0.5  # of 0 to 1: the deviation that they were divided by
        assert off.mean() <= 1 / 255
        assert off.max() <= 4 / 255


@pytest.mark.parametrize("size", [(333, 777), (3000, 2000)])
def test_an_image_that_a_client_reduced_is_read_alike(vision: VisionModel, size: tuple[int, int]) -> None:
    """To the largest that is not reduced here: it has as many tokens then."""
    tower = tower_of(open_checkpoint(vision.path))
    edge, pixels = largest_image(tower)
    if vision.kind in ("gemma3", "lfm2_vl", "internvl"):  # which stretch each edge alone
        assert (edge, pixels) == (None, None)
        return
    shares = [1.0, (edge or max(size)) / max(size), math.sqrt((pixels or math.prod(size)) / math.prod(size))]
    width, height = (round(length * min(shares)) for length in size)
    assert max(width, height) < max(size)
    assert layout_of(tower, width, height) == layout_of(tower, *size)


def features_of(tower: Tower, size: tuple[int, int]) -> int:
    return sum(layout_of(tower, *size).runs)


@pytest.mark.parametrize("most", [16, 17, 40, 80, 100, 144, 1000])
def test_images_are_reduced_to_so_many_tokens(vision: VisionModel, most: int) -> None:
    """An image that has no more is read as before, and so is every image where the bound is beyond the model's own."""
    tower = tower_of(open_checkpoint(vision.path))
    reduced = with_most_tokens(tower, most)
    steep = () if vision.kind == "lfm2_vl" else ((8, 1600), (1600, 8))
    for size in (*SIZES, (40, 40), *steep):
        layout = layout_of(reduced, *size)
        assert 0 < features_of(reduced, size) <= most
        assert most < 1000 or layout == layout_of(tower, *size)
        width, height = cut_of(reduced, *size).sizes[-1]
        assert layout.grid in (None, (height // PATCH // MERGE, width // PATCH // MERGE))


def test_an_image_of_any_size_fits_into_a_prompt(vision: VisionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that reads larger ones is given no more than the embeddings that a prompt may bring."""
    tower = tower_of(open_checkpoint(vision.path))
    monkeypatch.setattr("realizar.images.prepare.MOST_IMAGE_BYTES", 4 * tower.num_features * 20)
    if isinstance(tower.preparation, Fitted):
        assert features_of(with_most_tokens(tower, None), (3000, 2000)) <= 20 < features_of(tower, (3000, 2000))
        assert features_of(with_most_tokens(tower, 12), (3000, 2000)) <= 12
    else:
        assert with_most_tokens(tower, None) == tower


def test_less_detail_is_512_pixels_by_512(vision: VisionModel) -> None:
    """Of models that read more; the fewest tokens of one that has no choice."""
    tower = tower_of(open_checkpoint(vision.path))
    own = tower.preparation
    larger = (
        replace(own, most=1 << 20) if isinstance(own, Fitted)
        else replace(own, edge=1 << 12) if isinstance(own, Whole)
        else replace(own, edge=2048, tile=512) if isinstance(own, Tiles)
        else replace(own, tile=512, whole=replace(own.whole, most=512**2)) if vision.kind == "lfm2_vl"
        else replace(own, tile=512, whole=replace(own.whole, edge=512)) if vision.kind == "internvl"
        else replace(own, patches=1 << 16) if isinstance(own, Budgeted)
        else own
    )  # fmt: skip
    for size in ((1000, 1000), (2000, 300)):
        low = features_of(with_low_detail(replace(tower, preparation=larger, max_patches=1 << 16)), size)
        if isinstance(own, Stretched):
            assert low == features_of(tower, size)
        else:
            most = (512 // PATCH // tower.merge) ** 2
            assert 0.8 * most < low <= most


def test_bounds_that_a_model_can_not_keep_are_refused_by_name(vision: VisionModel) -> None:
    tower = tower_of(open_checkpoint(vision.path))
    fewest = {"smolvlm": 16, "gemma3": 16, "internvl": 16}.get(vision.kind, 1)
    assert features_of(with_most_tokens(tower, fewest), (100, 100)) <= fewest
    if fewest > 1:
        with pytest.raises(InvalidRequestError, match=f"image_max_tokens must be at least {fewest}, not 15: "):
            with_most_tokens(tower, fewest - 1)
    pixels = fewest * (PATCH * tower.merge) ** 2
    message = f"max_pixels must be at least {pixels}: this model reads no image as fewer"
    with pytest.raises(InvalidRequestError, match=message):
        bounded(tower, PixelBounds(most=pixels - 1))
    given = {"min_pixels": 400, "max_pixels": None}
    if vision.gives_patches:
        bounded(tower, read_bounds(given))
        with pytest.raises(InvalidRequestError, match="min_pixels must be at most 399"):
            bounded(tower, read_bounds(given | {"max_pixels": 399.0}))
    else:
        with pytest.raises(InvalidRequestError, match="min_pixels is not supported by this model"):
            bounded(tower, read_bounds(given))


@pytest.mark.parametrize(("least", "most"), [(256, 400), (1000, 1600), (64, 64 * 9)])
def test_pixels_within_bounds_are_those_of_the_processor(vision: VisionModel, least: int, most: int) -> None:
    if not vision.gives_patches:
        pytest.skip("the processors of other models have other bounds")
    frames = 2 if vision.kind == "glm4v" else 1
    tower = bounded(tower_of(open_checkpoint(vision.path)), PixelBounds(least, most))
    for size in (*SIZES, (5, 12), (9, 7)):
        image = as_image(size)
        found = vision.processor(
            images=[image],
            size={"shortest_edge": frames * least, "longest_edge": frames * most},
            return_tensors="pt",
        )
        rows, columns = (int(length) for length in found["image_grid_thw"][0][1:])
        (own,) = cut_of(tower, *size).sizes
        if rows * columns * PATCH**2 > most:  # enlarged beyond the bound, which holds here
            assert math.prod(own) <= most
        else:
            assert own == (columns * PATCH, rows * PATCH)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_features_agree_with_transformers(vision: VisionModel, is_gguf: bool, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(vision.path)
    if is_gguf:
        write_tower_file(checkpoint, tmp_path / "mmproj.gguf")
        checkpoint = open_checkpoint(tmp_path / "mmproj.gguf")
    encoder = CPUTower(tower := tower_of(checkpoint), checkpoint, threads=1)
    if vision.kind == "gemma4":  # a file does not say how many tokens an image has at most
        assert isinstance(tower.preparation, Budgeted)
        assert tower.preparation.patches == 9 * (280 if is_gguf else SOFT_TOKENS)
    if vision.kind == "glm4v" and is_gguf:  # nor how many pixels, which are the processor's, and what runs here
        assert isinstance(tower.preparation, Fitted)
        assert (tower.preparation.least, tower.preparation.most) == (112**2 // 2, (1 << 14) * PATCH**2)
    tower = replace(tower, preparation=tower_of(open_checkpoint(vision.path)).preparation)
    for size in SIZES[2:3] if is_gguf else SIZES:
        found = features(encoder, tower, size)
        assert np.ptp(found) > 5
        np.testing.assert_allclose(found, vision.features(vision.prepared([as_image(size)])), atol=1e-4)


@pytest.mark.parametrize("kind", ["smolvlm", "gemma3"])
def test_older_names_of_feed_forwards_are_known(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(build_vision_model(kind, tmp_path).path)
    found = []
    for swapped in (False, True):
        write_tower_file(checkpoint, tmp_path / "mmproj.gguf", swapped=swapped)
        file = open_checkpoint(tmp_path / "mmproj.gguf")
        found.append(features(CPUTower(tower := tower_of(file), file, threads=1), tower, SIZES[2]))
    np.testing.assert_array_equal(*found)


def test_a_tower_that_is_named_has_to_be_the_models(tmp_path: Path) -> None:
    """The models' embeddings have one width, so that it is what else they take that tells."""
    checkpoints = {}
    for kind in ("smolvlm", "mistral3", "qwen3_vl", "qwen3_5"):
        checkpoints[kind] = open_checkpoint(build_vision_model(kind, tmp_path / kind).path)
        write_tower_file(checkpoints[kind], tmp_path / f"{kind}.gguf")

    def opened(model: str, tower: str) -> bool:
        config = EngineConfig(mmproj=str(tmp_path / f"{tower}.gguf"))
        return open_images(checkpoints[model], load_tokenizer(checkpoints[model]), config) is not None

    assert all(opened(kind, kind) for kind in checkpoints)
    for model, tower, message in (
        ("smolvlm", "mistral3", r"mistral3\.gguf: the vocabulary has no token \[IMG\]"),
        ("qwen3_5", "qwen3_vl", r"qwen3_vl\.gguf: features that 2 layers add are not of qwen3_5, of which 0 do"),
        ("qwen3_vl", "qwen3_5", r"qwen3_5\.gguf: features that 0 layers add are not of qwen3_vl, of which 2 do"),
        ("mistral3", "qwen3_5", r"qwen3_5\.gguf: positions on three axes are not of mistral3"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            opened(model, tower)


def test_a_text_model_without_axes_takes_no_positions_on_three(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(build_vision_model("glm4v", tmp_path).path)
    assert find_tower(checkpoint) is not None
    config = checkpoint.metadata["config"]
    rope = {**config["text_config"]["rope_parameters"], "mrope_section": None}
    text = {**config["text_config"], "rope_parameters": rope}
    bent = replace(checkpoint, metadata={**checkpoint.metadata, "config": {**config, "text_config": text}})
    with pytest.raises(UnsupportedModelError, match="positions on three axes are not of"):
        find_tower(bent)


@pytest.mark.parametrize(
    ("projector", "message"),
    [
        ("kimivl", r"projector 'kimivl' is of Kimi-VL, whose text model \(deepseek2\) is not supported"),
        ("ldp", "unknown projector 'ldp'"),
    ],
)
def test_towers_of_no_model_that_runs_are_named(projector: str, message: str, tmp_path: Path) -> None:
    write_vision_files(tmp_path)
    checkpoint = open_checkpoint(tmp_path / "mmproj-tiny.gguf")
    bent = replace(checkpoint, metadata={**checkpoint.metadata, "clip.projector_type": projector})
    with pytest.raises(UnsupportedModelError, match=message):
        build_tower(bent)


@pytest.mark.parametrize(("kind", "most"), [(GGMLType.F16, 1e-3), (GGMLType.BF16, 1e-2), (GGMLType.Q8_0, 3e-2)])
@pytest.mark.parametrize("model", [None, "gemma4_e", "glm4v"])
def test_other_formats_of_weights_are_near(kind: GGMLType, most: float, model: str | None, tmp_path: Path) -> None:
    """The norm of the difference to float32 weights, over that of the features."""
    found = []
    for each in (GGMLType.F32, kind):
        folder = tmp_path / each.name
        folder.mkdir()
        if model is not None:
            whole = open_checkpoint(build_vision_model(model, folder).path)
            write_tower_file(whole, folder / "mmproj-tiny.gguf", kind=each)
        else:
            write_vision_files(folder, each)
        checkpoint = open_checkpoint(folder / "mmproj-tiny.gguf")
        tower = tower_of(checkpoint)
        found.append(CPUTower(tower, checkpoint, threads=1).encode(patches(tower, (TILE, TILE))[-1]))
    assert 0 < np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]) < most


def test_blocks_of_four_bits_are_near_what_they_say(tmp_path: Path) -> None:
    """As above; all but the matrix of patches."""
    write_vision_files(tmp_path, GGMLType.Q4_K, sizes=(256, 512))
    checkpoint = open_checkpoint(tmp_path / "mmproj-tiny.gguf")
    assert sum(each.ggml_type == GGMLType.Q4_K for each in checkpoint.tensors.values()) == 2 * 6 + 2
    tower = tower_of(checkpoint)
    picture = patches(tower, (TILE, TILE))[-1]
    found, wanted = (CPUTower(tower, each, threads=1).encode(picture) for each in (checkpoint, in_float32(checkpoint)))
    assert 0 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 3e-2


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_with_images_agree_with_transformers(vision: VisionModel, name: str) -> None:
    """In chunks, and then from the blocks that the first time left, with the same bits."""
    messages = CONVERSATIONS[name]
    ids, wanted = expected(vision, messages)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=0, logprobs=0)
    with LLM(vision.path, threads=1, max_step_tokens=max(48, vision.least_step)) as llm:
        assert llm.chat_tokens(messages) == ids
        assert ids.count(vision.feature) > 7
        (scored,) = llm.chat(messages, sampling)
        plain = replace(sampling, prompt_logprobs=None)
        first, again = (llm.chat(messages, plain)[0] for _ in range(2))
    np.testing.assert_allclose(logprobs(scored), wanted, atol=1e-4)
    assert again.num_cached_tokens == (len(ids) - 1) // 32 * 32
    assert first.outputs == again.outputs == scored.outputs
    with LLM(vision.path, threads=1, max_step_tokens=vision.least_step, speculative_tokens=2) as llm:
        assert llm.chat(messages, plain)[0].outputs == first.outputs


def test_text_models_from_gguf_files_see_the_same(
    vision: VisionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request as it comes to the engine, with embeddings and positions, and what layers add."""
    if vision.kind == "gemma3":
        pytest.skip("a GGUF file has no place for its scale of attention, and for which of two layers has a window")
    requests, add = list[Request](), EngineCore.add

    def noted(core: EngineCore, request: Request) -> None:
        requests.append(request)
        add(core, request)

    monkeypatch.setattr(EngineCore, "add", noted)
    messages = CONVERSATIONS["three images"]
    with LLM(vision.path, threads=1) as llm:
        llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    convert_to_gguf(vision.model, tmp_path / "text.gguf")
    core = load_core(open_checkpoint(tmp_path / "text.gguf"), EngineConfig(threads=1))
    core.add(requests[0])
    (outputs,) = run(core).values()
    core.close()
    found = [each.logprob for output in outputs for each in output.prompt_logprobs or () if each is not None]
    np.testing.assert_allclose(found, expected(vision, messages)[1], atol=1e-4)


def test_other_images_are_not_found_in_the_cache(vision: VisionModel) -> None:
    """Two images of one size have the same ids; text after an image starts from its blocks."""
    first, other = (Image.fromarray(pixels) for pixels in (image_of((333, 777)), 255 - image_of((333, 777))))
    sampling = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0)

    def asked(image: Any, *texts: str) -> list[dict[str, Any]]:
        more = [{"role": role, "content": text} for role, text in zip(("assistant", "user"), texts, strict=False)]
        return [{"role": "user", "content": [{"type": "image", "image": image}]}, *more]

    with LLM(vision.path, threads=1) as llm:
        (one,), (two,) = llm.chat(asked(first), sampling), llm.chat(asked(other), sampling)
        assert llm.chat_tokens(asked(first)) == llm.chat_tokens(asked(other))
        assert two.num_cached_tokens == 0
        assert one.outputs != two.outputs
        later = llm.chat(asked(first, "Yes.", "Why?"), sampling)[0]
        assert later.num_cached_tokens >= len(llm.chat_tokens(asked(first))) // 32 * 32 - 32
    with LLM(vision.path, threads=1) as llm:
        assert llm.chat(asked(other), sampling)[0].outputs == two.outputs


def test_marks_in_texts_stay_texts(vision: VisionModel) -> None:
    with LLM(vision.path, threads=1) as llm:
        assert max(llm.chat_tokens([{"role": "user", "content": vision.shown}])) < IMAGE
        with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\] is no image of a known format"):
            llm.chat_tokens([{"role": "user", "content": [{"type": "image", "image": b"<svg/>"}]}])
        if vision.gives_patches or vision.kind == "lfm2_vl":
            long = Image.fromarray(image_of((1, 300)))
            with pytest.raises(
                InvalidRequestError, match=r"content\[0\] can't be read: .*1 x 300 pixels are too steep"
            ):
                llm.chat_tokens([{"role": "user", "content": [{"type": "image", "image": long}]}])
        with pytest.raises(InvalidRequestError, match="must be a path, bytes or a Pillow image, not int"):
            llm.chat_tokens([{"role": "user", "content": [{"type": "image", "image": 3}]}])
        with pytest.raises(InvalidRequestError, match="can't be read: embedded null byte"):
            llm.chat_tokens([{"role": "user", "content": [{"type": "image", "image": "a\0b"}]}])


BENT = {
    "glm4v": [({"out_hidden_size": 63}, "'out_hidden_size': unsupported value 63")],
    "qwen3_vl": [({"deepstack_visual_indexes": ["a"]}, "expected whole numbers")],
    "internvl": [
        ({"use_qk_norm": True}, "'use_qk_norm': unsupported value True"),
        ({"norm_type": "rms_norm"}, "'norm_type': unsupported value 'rms_norm'"),
        ({"image_size": [32, 64]}, "'image_size': expected a whole number"),
    ],
    "lfm2_vl": [({"vision_use_head": True}, "'vision_use_head': unsupported value True")],
    "qwen2_5_vl": [
        ({"fullatt_block_indexes": 3}, "expected a list of layers"),
        ({"window_size": 7}, "7 pixels are less than a square of 2 x 2 patches"),
    ],
}
"""Changes of a `vision_config` that one kind of towers refuses, and what the errors say."""


def test_tensors_of_towers_are_strict(vision: VisionModel) -> None:
    """One that is missing, left over or of another shape is named; so are keys that change the result."""
    checkpoint = open_checkpoint(vision.path)
    check_tensors(build_spec(checkpoint), checkpoint)
    last = next(
        name
        for name in checkpoint.tensors
        if name.startswith(("model.vision_model.", "vision_tower.", "model.visual.", "visual.", "model.vision_tower."))
        and name.endswith("weight")
    )
    other = last.rsplit(".", 2)[0] + ".other.weight"
    without = {name: each for name, each in checkpoint.tensors.items() if name != last}
    more = {**checkpoint.tensors, other: checkpoint.tensors[last]}
    for tensors, message in ((without, f"missing {last}"), (more, f"unexpected {other}")):
        bent = replace(checkpoint, tensors=tensors)
        with pytest.raises(CheckpointError, match=message):
            check_tensors(tower_of(bent), bent)
    config = checkpoint.metadata["config"]
    activation = "hidden_activation" if vision.kind == "gemma4" else "hidden_act"
    for changes, message in (
        ({activation: "tanh"}, f"'{activation}': unsupported value 'tanh'"),
        ({"wide_layers": 3}, "'wide_layers': unsupported value 3"),
        ({"num_heads" if vision.gives_patches else "num_attention_heads": 5}, "5 heads do not divide"),
        ({"patch_size": 5}, "patch"),
        *BENT.get(checkpoint.architecture, []),
    ):
        vision_config = {**config["vision_config"], **changes}
        bent = replace(
            checkpoint, metadata={**checkpoint.metadata, "config": {**config, "vision_config": vision_config}}
        )
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
            build_tower(bent)


def test_vocabularies_may_lack_the_token_of_a_feature(tmp_path: Path) -> None:
    """As those of Gemma 3's GGUF files do; another id stands there then, and the answer is the same."""
    build_vision_model("gemma3", tmp_path)
    messages, sampling = CONVERSATIONS["three images"], SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    with LLM(tmp_path, threads=1) as llm:
        ids, (answer,) = llm.chat_tokens(messages), llm.chat(messages, sampling)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<image_soft_token>", "<unused>"))
    with LLM(tmp_path, threads=1) as llm:
        assert llm.chat_tokens(messages) == [0 if each == IMAGE else each for each in ids]
        assert llm.chat(messages, sampling)[0].outputs == answer.outputs


OTHERWISE = {
    "glm4v": [
        (
            *("preprocessor_config", {"size": {"shortest_edge": 511, "longest_edge": 4096}}),
            "'size': expected whole pixels of each of 2 frames",
        ),
    ],
    "gemma3": [
        ("config", {"mm_tokens_per_image": 15}, "'mm_tokens_per_image': 15 are no squares of 8 x 8 patches"),
        ("config", {"mm_tokens_per_image": 9}, "'mm_tokens_per_image': 9 are no squares of 8 x 8 patches"),
        ("preprocessor_config", {"size": {"height": 32, "width": 64}}, "'size': expected 32 pixels"),
        ("preprocessor_config", {"do_pan_and_scan": True}, "'do_pan_and_scan': unsupported value True"),
        ("preprocessor_config", {"resample": 3}, "'resample': unsupported value 3"),
    ],
    "gemma4": [
        ("text_config", {"num_kv_shared_layers": 2}, "'num_kv_shared_layers': unsupported value 2"),
        ("vision_config", {"position_embedding_size": 209}, "209 positions are too few for a picture's edge"),
        ("vision_config", {"rope_parameters": {"rope_type": "linear"}}, "rope_type': unsupported value 'linear'"),
        ("preprocessor_config", {"do_normalize": True}, "'do_normalize': unsupported value True"),
        ("preprocessor_config", {"pooling_kernel_size": 2}, "'pooling_kernel_size': unsupported value 2"),
    ],
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_a_model_does_otherwise_is_named(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(build_vision_model(kind, tmp_path).path)
    config = checkpoint.metadata["config"]
    for file, changes, message in OTHERWISE[kind]:
        if file in config:
            metadata = {"config": {**config, file: {**config[file], **changes}}}
        else:
            metadata = {file: {**checkpoint.metadata[file], **changes}}
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
            build_tower(replace(checkpoint, metadata={**checkpoint.metadata, **metadata}))


def test_bounds_of_matrices_are_numbers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(build_vision_model("gemma4_e", tmp_path).path)
    name = "model.vision_tower.encoder.layers.1.mlp.up_proj.input_max"
    stored = checkpoint.tensors[name]
    missing = {key: each for key, each in checkpoint.tensors.items() if key != name}
    wrong = checkpoint.tensors | {name: replace(stored, data=np.array([np.nan], np.float32).view(np.uint8))}
    for tensors, message in ((missing, f"'{name}': missing"), (wrong, f"'{name}': expected one number")):
        with pytest.raises(CheckpointError, match=message):
            build_tower(replace(checkpoint, tensors=tensors))
