"""Images in every dialect: answers, counts, what is found in the cache, and errors that name the image."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from images.vision_kinds import EDGE, IMAGE, TILE
from images.vision_models import encoded, image_of, write_vision_files
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.images import Kept, PlacedImage, open_images
from realizar.images.decode import Cut
from realizar.images.given import EncodedImage, GivenImage, pictures_of
from realizar.server.settings import ServerSettings
from realizar.tokenizer.load import load_tokenizer
from server_thread import NAME, RunningServer, ServerThread
from waits import HANG_S

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ServerSettings(image_hosts=("images.example",), ping_interval_s=HANG_S)  # errors come before a stream
    thread = ServerThread(write_vision_files(tmp_path_factory.mktemp("vision")), settings, EngineConfig(threads=1))
    yield thread.start()
    thread.stop()


@pytest.fixture
def eyes(seeing: RunningServer) -> Iterator[openai.OpenAI]:
    with seeing.client() as client:
        yield client


def url_of(size: tuple[int, int], kind: str = "PNG", **options: Any) -> str:
    data = encoded(Image.fromarray(image_of(size)), kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"


def shown(url: str, text: str = "What is this?", **options: Any) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url, **options}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def asked(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, temperature=0, **options)


def test_a_stream_and_a_whole_answer_say_the_same_of_an_image(eyes: openai.OpenAI) -> None:
    messages = [shown(url_of((333, 777)), detail="high")]
    whole = asked(eyes, messages)
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in asked(eyes, messages, stream=True) if chunk.choices
    )
    assert streamed == whole.choices[0].message.content != ""
    assert asked(eyes, [shown(url_of((64, 64)))]).choices[0].message.content != streamed


def test_tokens_of_images_are_counted(eyes: openai.OpenAI, seeing: RunningServer) -> None:
    """Lossless files of the same pixels are the same prompt."""
    messages = [
        shown(url_of((2000, 300))),
        {"role": "assistant", "content": "So."},
        shown(url_of((28, 28)), "And this?"),
    ]
    answer = httpx.post(f"{seeing.url}/tokenize", json={"model": NAME, "messages": messages}).json()
    assert answer["tokens"].count(IMAGE) == 16 * (3 + 1 + 9 + 1)
    usage = asked(eyes, messages).usage
    assert usage.prompt_tokens == answer["count"]
    assert asked(eyes, messages).usage.prompt_tokens_details.cached_tokens > 16 * 13
    again = [shown(url_of((2000, 300), "WEBP", lossless=True)), *messages[1:]]
    assert asked(eyes, again).usage.prompt_tokens_details.cached_tokens > 16 * 13


def test_later_turns_encode_no_image_again(
    eyes: openai.OpenAI, seeing: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Any] = [shown(url_of((500, 400)))]
    first = asked(eyes, messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Why?"},
    ]
    monkeypatch.setattr(seeing.model.images, "_made", None)
    second = asked(eyes, messages)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 32 * 32 - 32


def test_an_image_that_is_shown_twice_is_decoded_once(
    eyes: openai.OpenAI, seeing: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, made = seeing.model.images, []
    assert reader is not None
    decode = reader._made

    def noted(image: PlacedImage) -> Kept:
        made.append(image.key)
        return decode(image)

    monkeypatch.setattr(reader, "_made", noted)
    once, twice = shown(url_of((70, 90))), shown(url_of((70, 90)), "And now?")
    asked(eyes, [once, {"role": "assistant", "content": "So."}, twice])
    assert len(made) == 1


def test_prompts_that_wait_with_one_image_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded for a prompt before its turn, and by then the pictures of the first are kept."""
    checkpoint = open_checkpoint(write_vision_files(tmp_path))
    reader, decoded = open_images(checkpoint, load_tokenizer(checkpoint), EngineConfig(threads=1)), []
    assert reader is not None

    def noted(image: EncodedImage, cut: Cut) -> Any:
        decoded.append(image.where)
        return pictures_of(image, cut)

    monkeypatch.setattr("realizar.engine.images.pictures_of", noted)
    images = [GivenImage(where, url=url_of((70, 90))).open() for where in ("first", "second")]
    _, (starts,), _ = reader.expand([IMAGE], images[:1])
    waiting = [reader.prepare(image, starts) for image in images]
    assert decoded == []
    first, second = (reader.pictures([each]) for each in waiting)
    assert decoded == ["first"]
    assert first == second


URL = url_of((64, 64))
NOT_READ = [
    ("image_url.url", "must be text", {"type": "image_url", "image_url": {"url": 3}}),
    ("image_url.detail", "must be auto, low, high", {"type": "image_url", "image_url": {"url": URL, "detail": "x"}}),
    ("image_url", "must be|is", {"type": "image_url", "image_url": URL}),
    ("image_url", "fetches no images", {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}),
    ("image_url", "no image of a known", {"type": "image_url", "image_url": {"url": "data:a/b;base64,PHN2Zz4="}}),
    ("image_url", "is malformed", {"type": "image_url", "image_url": {"url": URL[: 22 + len(URL) // 2 // 4 * 4]}}),
    ("type", "not supported", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "message", "part"), NOT_READ)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_image(seeing: RunningServer, field: str, message: str, part: Any, stream: bool) -> None:
    messages = [shown(URL), {"role": "assistant", "content": "So."}, {"role": "user", "content": [part]}]
    body = {"model": NAME, "messages": messages, "stream": stream}
    answer = httpx.post(f"{seeing.url}/v1/chat/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == f"messages[2].content[0].{field}"
    assert "messages[2].content[0]" in error["message"]
    assert re.search(message, error["message"])


def test_turns_whose_images_take_too_much_are_dropped(seeing: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a client allows it; else it learns that its prompt is too long."""
    monkeypatch.setattr("realizar.engine.images.MOST_IMAGE_BYTES", 250 << 10)  # of one image, of 160 KiB
    turn = {"role": "user", "content": [{"type": "input_image", "image_url": url_of((28, 28))}]}
    body = {"model": NAME, "max_output_tokens": 16, "input": [turn, {"role": "assistant", "content": "So."}, turn]}
    for truncation, status in (("auto", 200), ("disabled", 400)):
        answer = httpx.post(f"{seeing.url}/v1/responses", json={**body, "truncation": truncation}, timeout=HANG_S)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "the prompt's images take 327.7 kB to encode, so the prompt is too long" in answer.text


def test_where_turns_are_dropped_each_image_is_opened_once(
    seeing: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the conversation is tried without its oldest turns."""
    monkeypatch.setattr("realizar.engine.images.MOST_IMAGE_BYTES", 250 << 10)  # of one image, of 160 KiB
    shown_once = [[{"type": "input_image", "image_url": url_of((28, 28 - turn))}] for turn in range(9)]
    turns: list[Any] = []
    for parts in shown_once:
        turns += [{"role": "user", "content": parts}, {"role": "assistant", "content": "So."}]
    body = {"model": NAME, "max_output_tokens": 16, "truncation": "auto", "input": turns[:-1]}
    opened = list[bytes]()
    open_one = GivenImage.open

    def counted(image: GivenImage) -> EncodedImage:
        opened.append(open_one(image).data)
        return open_one(image)

    monkeypatch.setattr(GivenImage, "open", counted)
    posted(seeing, "/v1/responses", body)
    assert len(opened) == len(set(opened)) == len(shown_once)


def test_prompts_of_too_many_images_are_refused(eyes: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of them is decoded."""
    monkeypatch.setattr("realizar.engine.images.pictures_of", None)
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is \d+ tokens"):
        asked(eyes, [shown(url_of((96, 95)))] * 14)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less detail is as many pixels as a tile of this model's has."""
    monkeypatch.setattr("realizar.images.prepare._LOW", TILE**2)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_less_detail_takes_fewer_tokens(seeing: RunningServer, path: str, little: None) -> None:
    """One picture, where the model cuts the image into tiles; both may be in one prompt."""

    def count(*details: str | None) -> int:
        given: list[dict[str, Any]] = [{} if each is None else {"detail": each} for each in details]
        if path == "/v1/responses":
            parts = [{"type": "input_image", "image_url": URL, **each} for each in given]
            body, where = (
                {"input": [{"role": "user", "content": parts}], "max_output_tokens": 1},
                "$.usage.input_tokens",
            )
        else:
            shown_parts = [{"type": "image_url", "image_url": {"url": URL, **each}} for each in given]
            body, where = (
                {"messages": [{"role": "user", "content": shown_parts}], "max_tokens": 1},
                "$.usage.prompt_tokens",
            )
        return int(found(posted(seeing, path, body), where))

    whole, low = count(None), count("low")
    assert {count(each) for each in ("auto", "high", "original")} == {whole}
    assert whole - low > 16 * 9
    assert count("low", "high", "low") - whole == 2 * (count("low", "low") - low)
    answer = httpx.post(
        f"{seeing.url}/v1/responses",
        json={"model": NAME, "input": [{"role": "user", "content": [INPUT_IMAGE | {"detail": "most"}]}]},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[0].detail")


def test_an_image_is_seen_otherwise_with_less_detail(eyes: openai.OpenAI, little: None) -> None:
    """Its embeddings are kept by the image and by how it is read."""
    texts = [
        asked(eyes, [shown(url_of((90, 60)), **detail)]).choices[0].message.content
        for detail in ({}, {"detail": "low"}, {}, {"detail": "low"})
    ]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


def test_requests_bound_the_pixels_of_their_images(seeing: RunningServer, client: openai.OpenAI) -> None:
    messages = [shown(URL), {"role": "assistant", "content": "So."}, shown(URL)]

    def answer(server: RunningServer, path: str, kwargs: Any, messages: list[Any] = messages) -> Any:
        body = {"model": NAME, "messages": messages, "mm_processor_kwargs": kwargs}
        return httpx.post(f"{server.url}{path}", json=body, timeout=HANG_S)

    bounds = {"max_pixels": 5.0 * TILE**2, "min_pixels": None}
    counted = answer(seeing, "/tokenize", bounds).json()
    assert counted["tokens"].count(IMAGE) == 2 * 16 * 5
    usage = answer(seeing, "/v1/chat/completions", bounds).json()["usage"]
    assert usage["prompt_tokens"] == counted["count"]
    for kwargs, param, message in (
        ({"max_pixels": 1023}, ".max_pixels", "must be at least 1024"),
        ({"max_pixels": 0}, ".max_pixels", "must be a whole number from 1 on"),
        ({"max_pixels": 2000.5}, ".max_pixels", "must be a whole number from 1 on"),
        ({"max_pixels": True}, ".max_pixels", "must be a whole number from 1 on"),
        ({"min_pixels": 9}, ".min_pixels", "is not supported by this model"),
        ({"size": {}}, ".size", "is not supported: min_pixels and max_pixels are"),
    ):
        for text in (messages, ASKED):
            refused = answer(seeing, "/v1/chat/completions", kwargs, text)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, f"mm_processor_kwargs{param}"), kwargs
            assert message in error["message"]
    with pytest.raises(openai.BadRequestError, match="mm_processor_kwargs is not supported: the model reads text only"):
        client.chat.completions.create(
            model=NAME, messages=ASKED, extra_body={"mm_processor_kwargs": {"max_pixels": 4000}}
        )


def test_lists_of_models_say_what_they_read(eyes: openai.OpenAI, seeing: RunningServer) -> None:
    (card,) = (each.to_dict() for each in eyes.models.list().data if each.id == NAME)
    assert card["largest_image"] == {"edge": EDGE, "pixels": None}
    shown = httpx.post(f"{seeing.url}/api/show", json={"model": NAME}).json()
    assert shown["capabilities"] == card["capabilities"] == ["completion", "vision"]
    assert shown["details"]["families"] == ["llama", "clip"]


def test_images_are_of_users_and_tools(eyes: openai.OpenAI) -> None:
    for role in ("system", "assistant"):
        with pytest.raises(openai.BadRequestError, match="only messages of users and tools"):
            asked(eyes, [{**shown(URL), "role": role}, {"role": "user", "content": "?"}])


def test_a_file_beside_a_model_may_be_of_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which is logged, and the model reads text alone."""
    checkpoint = open_checkpoint(write_vision_files(tmp_path))
    tokenizer = load_tokenizer(checkpoint)
    assert open_images(checkpoint, tokenizer, EngineConfig(threads=1)) is not None
    other = replace(checkpoint, metadata={**checkpoint.metadata, f"{checkpoint.architecture}.embedding_length": 96})
    assert open_images(other, tokenizer, EngineConfig(threads=1)) is None
    assert "are not of tiny.gguf, whose embeddings have 96" in caplog.text


def test_a_model_that_reads_text_refuses_images_by_name(client: openai.OpenAI) -> None:
    for url in (URL, "https://example.com/a.png"):
        with pytest.raises(openai.BadRequestError, match="the model reads text only") as caught:
            client.chat.completions.create(model=NAME, messages=[shown(url)])
        assert caught.value.code == "unsupported_content"


# Where each dialect has an image and a text after it, its answer's text, and its count of the prompt's tokens.

DATA = URL.partition(",")[2]
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
OPENAI_IMAGE = {"type": "image_url", "image_url": {"url": URL}}
DIALECTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [shown(URL)], "max_tokens": 8, "temperature": 0},
        "$.choices.0.message.content",
        "$.usage.prompt_tokens",
    ),
    "anthropic": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [ANTHROPIC_IMAGE, {"type": "text", "text": "What is this?"}]}],
            "max_tokens": 8, "temperature": 0,
        },
        "$.content.0.text",
        "$.usage",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [INPUT_IMAGE, {"type": "input_text", "text": "What is this?"}]}],
            "max_output_tokens": 8, "temperature": 0,
        },
        "$.output.0.content.0.text",
        "$.usage.input_tokens",
    ),
    "ollama's chat": (
        "/api/chat",
        {
            "messages": [{"role": "user", "content": "What is this?", "images": [DATA]}],
            "stream": False, "options": {"num_predict": 8, "temperature": 0},
        },
        "$.message.content",
        "$.prompt_eval_count",
    ),
    "ollama's generate": (
        "/api/generate",
        {
            "prompt": "What is this?", "images": [DATA], "stream": False,
            "options": {"num_predict": 8, "temperature": 0},
        },
        "$.response",
        "$.prompt_eval_count",
    ),
}  # fmt: skip


def found(answer: Any, path: str) -> Any:
    for name in path.split(".")[1:]:
        answer = answer[int(name) if name.isdigit() else name]
    if isinstance(answer, dict):  # Anthropic's counts of the prompt, apart by what the cache had
        return sum(answer[name] or 0 for name in answer if name.endswith("input_tokens"))
    return answer


def posted(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{server.url}{path}", json={"model": NAME, **body}, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_dialect_shows_an_image_alike(seeing: RunningServer) -> None:
    texts, counts = set(), set()
    for path, body, text, count in DIALECTS.values():
        answer = posted(seeing, path, body)
        texts.add(found(answer, text))
        counts.add(found(answer, count))
    assert len(texts) == len(counts) == 1
    assert min(counts) > 16 * 10


FETCHED = "http://images.example/a.png"
SOURCE = {"type": "url", "url": FETCHED}


def test_an_image_of_a_named_host_is_shown_as_its_bytes_are(
    seeing: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each request, also to count its tokens."""
    asked = []

    def fetch(url: str, *_: Any) -> bytes:
        asked.append(url)
        return base64.b64decode(DATA)

    monkeypatch.setattr("realizar.server.http.image_fetch._fetch", fetch)
    for name in ("chat", "anthropic", "responses"):
        path, body, text, count = DIALECTS[name]
        remote = json.loads(json.dumps(body).replace(json.dumps(ANTHROPIC_IMAGE["source"]), json.dumps(SOURCE)))
        answer, wanted = (
            posted(seeing, path, json.loads(json.dumps(remote).replace(URL, FETCHED))),
            posted(seeing, path, body),
        )
        assert (found(answer, text), found(answer, count)) == (found(wanted, text), found(wanted, count))
    messages = [shown(FETCHED), {"role": "assistant", "content": "So."}, shown(FETCHED)]
    assert posted(seeing, "/tokenize", {"messages": messages})["tokens"].count(IMAGE) > 2 * 16 * 9
    assert asked == [FETCHED] * 4


def test_a_prompt_may_be_an_image_alone(seeing: RunningServer) -> None:
    """Without images an empty prompt loads the model."""
    path, body, _, count = DIALECTS["ollama's generate"]
    assert found(posted(seeing, path, body | {"prompt": ""}), count) > 16 * 10
    assert posted(seeing, path, body | {"prompt": "", "images": []})["done_reason"] == "load"


def test_a_context_that_lost_its_image_is_refused(seeing: RunningServer) -> None:
    path, body, _, _ = DIALECTS["ollama's generate"]
    spoken = posted(seeing, path, body | {"images": []})["context"]
    shown = posted(seeing, path, body | {"context": spoken})["context"]
    assert shown[: len(spoken)] == spoken
    again = {"model": NAME, "prompt": "Why?", "context": shown}
    answer = httpx.post(f"{seeing.url}{path}", json=again, timeout=HANG_S)
    assert answer.status_code == 400
    assert "context has tokens of an image" in answer.text


CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "call00001", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "call00001", "content": [ANTHROPIC_IMAGE]}
ASKED: list[Any] = [{"role": "user", "content": "Look."}]
RESULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [
                *ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call00001", "content": [OPENAI_IMAGE]},
            ],
        },
        "$.usage.prompt_tokens",
    ),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [*ASKED, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}],
        },
        "$.usage",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                *ASKED, {"type": "function_call", "call_id": "call00001", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call00001", "output": [INPUT_IMAGE]},
            ],
        },
        "$.usage.input_tokens",
    ),
    "ollama": (
        "/api/chat",
        {
            "stream": False,
            "messages": [
                *ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
                {"role": "tool", "tool_name": "look", "content": "", "images": [DATA]},
            ],
        },
        "$.prompt_eval_count",
    ),
}  # fmt: skip


def test_results_of_tools_may_be_images(seeing: RunningServer) -> None:
    counts = {found(posted(seeing, path, body), count) for path, body, count in RESULTS.values()}
    assert min(counts) > 16 * 10
    assert max(counts) - min(counts) <= 1


def with_twice(value: Any) -> Any:
    """A body whose images are each there twice, one after the other."""
    if isinstance(value, dict):
        return {name: with_twice(each) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    images = (OPENAI_IMAGE, ANTHROPIC_IMAGE, INPUT_IMAGE, DATA)
    return [with_twice(each) for each in value for _ in range(1 + (each in images))]


@pytest.mark.parametrize("dialect", [*DIALECTS, *(f"a result of {name}" for name in RESULTS)])
def test_there_may_be_several_images(seeing: RunningServer, dialect: str) -> None:
    """In one message, and in one result of a tool."""
    if dialect in DIALECTS:
        path, body, _, count = DIALECTS[dialect]
    else:
        path, body, count = RESULTS[dialect.removeprefix("a result of ")]
    one, two = (found(posted(seeing, path, each), count) for each in (body, with_twice(body)))
    assert 16 * 10 < two - one < one


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [ANTHROPIC_IMAGE | {
            "source": {"type": "url", "url": "http://169.254.169.254/"}}]}]}, "messages.0.content.0.source"),
        *(("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [ANTHROPIC_IMAGE | {
            "source": {"type": "base64", "media_type": said, "data": DATA}}]}]}, f"messages.0.content.0.source{what}")
            for said, what in (
                ("image/jpeg", " is said to be image/jpeg, and its bytes are image/png"),
                ("image/jpg", ".media_type must be one of image/png, image/jpeg, image/webp, image/gif"),
                (None, ".media_type must be one of"),
                ([], ".media_type must be one of"),
            )),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{
            "type": "document", "source": {}}]}]}, "0.type 'document' is not supported: models read text, and images"),
        ("/v1/responses", {"input": [{"role": "user", "content": [INPUT_IMAGE | {
            "image_url": "https://example.com/"}]}]}, "input[0].content[0].image_url"),
        ("/api/chat", {"messages": [{"role": "user", "content": "", "images": ["PHN2Zz4="]}]}, "messages[0].images[0]"),
        ("/api/generate", {"prompt": "a", "images": ["a*"]}, "images[0]"),
        ("/api/generate", {"prompt": "a", "images": [DATA], "raw": True}, "images"),
    ],
)  # fmt: skip
def test_errors_of_other_dialects_name_the_image(
    seeing: RunningServer, path: str, body: dict[str, Any], where: str
) -> None:
    answer = httpx.post(f"{seeing.url}{path}", json={"model": NAME, **body}, timeout=HANG_S)
    assert answer.status_code == 400, answer.text
    assert where in answer.text
