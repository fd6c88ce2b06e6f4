"""Images of the chat page: pasted, dropped and chosen, reduced to what the model reads, kept, exported and imported."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from images.vision_models import encoded, image_of, write_vision_files
from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from scripted_api import ScriptedApi, held
from server_thread import ServerThread
from web.page_driver import ask, finished, new_chat, stored
from web.test_accessibility import violations
from web.test_library import CHAT, FILE, MESSAGE, bring, export, open_chats

Image = pytest.importorskip("PIL.Image", reason="images are made and looked at by Pillow")

GIVE = """([kind, name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), each => each.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  if (kind === 'paste') {
    document.getElementById('prompt').dispatchEvent(new ClipboardEvent('paste', { clipboardData: given, ...options }));
  } else {
    log.dispatchEvent(new DragEvent('drop', { dataTransfer: given, ...options }));
  }
}"""


def give(page: Any, how: str, name: str, data: bytes, kind: str = "image/png") -> None:
    """Paste or drop a file; it need not be read yet."""
    page.evaluate(GIVE, [how, name, kind, base64.b64encode(data).decode()])


def chips(page: Any, count: int) -> None:
    page.wait_for_function("count => document.querySelectorAll('#files .picture').length === count", arg=count)


def sent(api: ScriptedApi, place: int = -1) -> tuple[list[Any], list[str]]:
    """The images of a request's last question, and its texts."""
    content = next(each["content"] for each in reversed(api.requests[place]["messages"]) if each["role"] == "user")
    assert [part["type"] for part in content] == sorted(part["type"] for part in content), "images come first"
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    assert [f"data:image/{image.format.lower()};base64" for image in images] == [url.partition(",")[0] for url in urls]
    return images, [part["text"] for part in content if part["type"] == "text"]


def solid(size: tuple[int, int], colour: Any, mode: str = "RGB") -> Any:
    return Image.new(mode, size, colour)


@pytest.fixture
def seeing(echo: ScriptedApi, page: Any) -> ScriptedApi:
    """The page over a model that reads images of up to 300 pixels an edge."""
    echo.largest_image = {"edge": 300, "pixels": None}
    page.goto(echo.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    return echo


def test_images_are_pasted_dropped_and_chosen(seeing: ScriptedApi, page: Any, tmp_path: Path) -> None:
    """In the order in which they come, each no larger than the model reads it."""
    assert page.get_attribute("#attach", "aria-label") == "Add images and text files"
    give(page, "paste", "wide.png", encoded(solid((900, 450), (200, 30, 30))))
    chips(page, 1)
    rotated = Image.Exif()
    rotated[0x0112] = 6
    halves = solid((80, 40), (255, 255, 255))
    halves.paste((0, 0, 0), (0, 0, 40, 40))
    photo = encoded(halves, "JPEG", quality=95, exif=rotated)
    give(page, "drop", "photo.jpg", photo, "image/jpeg")
    chips(page, 2)
    (tmp_path / "clear.webp").write_bytes(encoded(solid((10, 10), (0, 0, 0, 0), "RGBA"), "WEBP", lossless=True))
    (tmp_path / "notes.txt").write_text("a note")
    page.set_input_files("#attach-file", [tmp_path / "clear.webp", tmp_path / "notes.txt"])
    page.wait_for_selector("#files li:has-text('notes.txt (1 line)')")
    assert page.locator("#files span").all_inner_texts() == [
        *("wide.png", "photo.jpg", "clear.webp", "notes.txt (1 line)")
    ]
    ask(page, "What are these?")
    finished(page)
    (wide, upright, clear), texts = sent(seeing)
    assert texts == ["notes.txt:\n```\na note\n```\n\nWhat are these?"]
    assert (wide.size, wide.format, wide.getpixel((150, 75))) == ((300, 150), "PNG", (200, 30, 30, 255))
    assert upright.size == (40, 80), "as EXIF turns it"
    assert upright.getpixel((20, 10))[0] < 40 < 220 < upright.getpixel((20, 70))[0]
    assert b"Exif" not in encoded(upright)
    assert (clear.size, clear.getpixel((5, 5))) == ((10, 10), (255, 255, 255, 255)), "over white"


def test_pixels_are_bounded_and_large_files_become_jpeg(seeing: ScriptedApi, page: Any) -> None:
    seeing.largest_image = {"edge": None, "pixels": 600 * 450}
    page.reload()
    noise = np.random.default_rng(1).integers(0, 256, (600, 800, 3), dtype=np.uint8)
    give(page, "drop", "noise.png", encoded(Image.fromarray(noise)))
    chips(page, 1)
    page.press("#prompt", "Enter")
    finished(page)
    (image,), texts = sent(seeing)
    assert (image.size, image.format, texts) == ((600, 450), "JPEG", [])
    new_chat(page)
    page.click("#open-chats")
    page.wait_for_selector(".chat-title:has-text('noise.png')")


def test_a_question_waits_for_its_image(seeing: ScriptedApi, page: Any) -> None:
    give(page, "paste", "image.png", encoded(Image.fromarray(image_of((2000, 1500)))))
    ask(page, "What is this?")
    finished(page)
    (image,), texts = sent(seeing)
    assert (image.size, texts) == ((300, 225), ["What is this?"])


def test_images_stay_with_their_messages(seeing: ScriptedApi, page: Any, browser: Any, tmp_path: Path) -> None:
    """Over a reload before and after they are sent, in an edit, and in an export that another browser takes in."""
    give(page, "paste", "red.png", encoded(solid((60, 40), (255, 0, 0))))
    chips(page, 1)
    page.reload()
    chips(page, 1)
    ask(page, "Which colour?")
    finished(page)
    first = seeing.requests[0]["messages"]
    page.reload()
    page.wait_for_function("() => document.querySelector('.user .picture')?.naturalWidth === 60")
    assert page.get_attribute(".user .picture", "alt") == "red.png"
    ask(page, "Sure?")
    finished(page, 2)
    assert seeing.requests[1]["messages"][:1] == first
    page.locator(".user").first.hover()
    page.locator("[aria-label='Edit and ask again']").first.click()
    page.fill(".editor textarea", "Which one?")
    page.press(".editor textarea", "Enter")
    page.wait_for_selector(".user .place:has-text('2 / 2')")
    finished(page)
    assert sent(seeing)[1] == ["Which one?"]
    assert seeing.requests[2]["messages"][0]["content"][0] == first[0]["content"][0], "an edit keeps the image"
    assert violations(page) == []
    open_chats(page)
    path = export(page, "#export-chats", tmp_path)
    context = browser.new_context()
    other = context.new_page()
    other.goto(seeing.url)
    other.click("#open-chats")
    bring(other, path, "1 chat was imported.")
    other.click(".chat-open")
    other.wait_for_function("() => document.querySelector('.user .picture')?.naturalWidth === 60")
    here, there = ({each["id"]: each.get("files") for each in stored(one)[1]} for one in (page, other))
    assert here == there
    context.close()


def test_a_model_that_reads_text_takes_no_image(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    assert page.get_attribute("#attach", "aria-label") == "Add text files"
    give(page, "paste", "image.png", encoded(solid((10, 10), 0)))
    page.wait_for_selector("#notices:has-text('“image.png” is an image, and scripted-1b reads text only.')")
    assert page.locator("#files li").count() == 0
    page.press("#prompt", "Enter")
    assert echo.requests == []


def test_what_is_no_image_is_refused_with_a_sentence(seeing: ScriptedApi, page: Any, tmp_path: Path) -> None:
    for name, kind, data, reason in (
        ("broken.png", "image/png", encoded(solid((60, 40), 0))[:40], "is no image that this browser reads."),
        ("page.jpg", "image/jpeg", b"<html></html>", "is no image that this browser reads."),
    ):
        give(page, "drop", name, data, kind)
        page.wait_for_selector(f"#notices:has-text('“{name}” {reason}')")
    (tmp_path / "large.png").write_bytes(bytes((32 << 20) + 1))
    page.set_input_files("#attach-file", tmp_path / "large.png")
    page.wait_for_selector("#notices:has-text('“large.png” is larger than 32 MiB')")
    give(page, "drop", "drawing.svg", b"<svg onload='window.hit=1'/>", "image/svg+xml")
    page.wait_for_selector("#files li:has-text('drawing.svg (1 line)')")
    assert page.locator("#files .picture").count() == 0, "it is text"
    assert page.evaluate("window.hit") is None


def test_a_draft_without_room_keeps_its_texts(seeing: ScriptedApi, page: Any) -> None:
    give(page, "drop", "notes.txt", b"a note", "text/plain")
    give(page, "drop", "image.png", encoded(solid((60, 40), 0)))
    chips(page, 1)
    page.evaluate(
        "() => { const { setItem } = Storage.prototype; Storage.prototype.setItem = function (name, text) {"
        " if (text.includes('data:image')) throw new Error('full'); setItem.call(this, name, text); }; }"
    )
    give(page, "drop", "image.png", encoded(solid((60, 40), 0)))
    chips(page, 2)
    page.reload()
    page.wait_for_selector("#files li:has-text('notes.txt')")
    assert page.locator("#files li").count() == 1


def test_addresses_in_an_import_are_no_images(seeing: ScriptedApi, page: Any, tmp_path: Path) -> None:
    """Nor are pictures that this page would not have made: such files are left out."""
    urls = (
        *("http://127.0.0.1/a.png", "data:image/svg+xml;base64,PHN2Zz4=", "data:image/png;base64,<>", "javascript:1"),
        *({"toString": 1}, None),
    )
    chats = [
        {**CHAT, "id": f"c{i}", "messages": [{**MESSAGE, "id": f"m{i}", "files": [{"name": "a.png", "url": url}]}]}
        for i, url in enumerate(urls)
    ]
    (tmp_path / "bad.json").write_text(json.dumps({**FILE, "chats": chats}))
    page.click("#open-chats")
    bring(page, tmp_path / "bad.json", f"{len(urls)} chats were imported.")
    assert [key for each in stored(page)[1] for key in each if key == "files"] == []


def test_an_image_is_seen_while_its_answer_comes(seeing: ScriptedApi, page: Any) -> None:
    """The end stays in sight when the image takes its room."""
    seeing.script = lambda body: held("once upon a time")
    page.set_viewport_size({"width": 700, "height": 420})
    give(page, "drop", "tall.png", encoded(Image.fromarray(image_of((300, 300)))))
    chips(page, 1)
    ask(page, "What is this?")
    page.wait_for_selector(".assistant .body:has-text('once upon')")
    page.wait_for_function("() => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2")
    assert page.evaluate("() => document.querySelector('.user .picture').getBoundingClientRect().height > 200")
    page.click("#stop")


def test_a_model_answers_about_an_image(tmp_path: Path, page: Any) -> None:
    """Over the real server: it says what it reads, and counts the image's tokens."""
    thread = ServerThread(write_vision_files(tmp_path), ServerSettings(), EngineConfig(threads=1))
    server = thread.start()
    try:
        page.goto(server.url)
        page.click("#open-settings")
        page.fill("[data-setting=max_tokens]", "8")
        page.click("#settings .primary")
        give(page, "drop", "shot.png", encoded(Image.fromarray(image_of((960, 480)))))
        chips(page, 1)
        ask(page, "What is this?")
        page.wait_for_selector(".assistant[aria-busy=false] .stats:has-text('tok')")
        used = next(each["used"] for each in stored(page)[1] if each["role"] == "assistant")
        assert used > 16 * (3 * 2 + 1), "tiles of 96 x 64 pixels, and the whole"
    finally:
        thread.stop()
