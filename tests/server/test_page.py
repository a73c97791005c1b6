"""The page in a real Chromium: against a server that answers what the test says, and against Motley's own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: the page is not tested"
)
pytest.importorskip("uvicorn", reason="uvicorn is not installed: the page is not tested")

from page_server import PageServer  # noqa: E402
from serving import RunningServer  # noqa: E402

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
WAIT = 60_000  # milliseconds: only a hang takes so long
Page = Any
Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    running = PageServer()
    yield running
    running.close()


@pytest.fixture
def open_page(browser: Any, server: PageServer) -> Iterator[Opener]:
    """Opens the page; what goes wrong in it fails the test."""
    contexts, problems = [], []

    def open_one(
        url: str = server.url, *, width: int = 1280, scheme: str = "light", strict: bool = True
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        if strict:
            page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.goto(url)
        if strict:
            page.wait_for_selector("body[data-state=ready]")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


def ask(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page: Page, n: int = 1) -> Any:
    """The last of n answers, when it is complete."""
    page.wait_for_function(
        "n => document.querySelectorAll('.message.assistant').length >= n && document.querySelector('#stop').hidden",
        arg=n,
    )
    return page.locator(".message.assistant").last


def test_an_answer_streams_and_is_markdown(server: PageServer, open_page: Opener) -> None:
    text = (
        "# Title\n\nSome **bold** and `code`.\n\n- one\n- two\n  - deep\n\n```python\nprint(1)\n```\n\n"
        "| a | b |\n|--|--|\n| 1 | 2 |\n"
    )
    server.answers = [[{"content": text[i : i + 5]} for i in range(0, len(text), 5)]]
    page = open_page()
    ask(page, "Hello <b>you</b>")
    answer = answered(page)
    assert answer.locator("h2").inner_text() == "Title"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("li li").inner_text() == "deep"
    assert answer.locator("pre code").inner_text() == "print(1)"
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    assert page.locator(".message.user .content").inner_text() == "Hello <b>you</b>"
    assert "50.0 tokens/s" in page.locator("#speed").inner_text()
    assert "of 8,192 tokens" in page.locator("#context").inner_text()
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hello <b>you</b>"}]
    assert page.evaluate("document.querySelector('.message.assistant').innerHTML").count("<script") == 0


HOSTILE = """<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 1">
[click](javascript:window.hacked=1) [data](data:text/html,<script>window.hacked=1</script>) [ok](https://example.com/"onmouseover="x)
<javascript:window.hacked=1> ![img](javascript:window.hacked=1) ![far](https://example.com/pixel.png)

```"><img src=x onerror=window.hacked=1>
</code></pre><script>window.hacked = 1</script>
```

| <img src=x onerror=window.hacked=1> |
|--|
| <svg onload=window.hacked=1> |
"""


def test_hostile_text_stays_text(server: PageServer, open_page: Opener) -> None:
    calls = [
        {
            "index": 0,
            "id": "c",
            "function": {"name": "<img src=x onerror=window.hacked=1>", "arguments": HOSTILE},
        }
    ]
    server.answers = [[{"reasoning_content": HOSTILE}, {"content": HOSTILE}, {"tool_calls": calls}]]
    page = open_page()
    ask(page, HOSTILE)
    answer = answered(page)
    page.locator("a", has_text="click").count()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#messages script, #messages img, #messages svg, #messages iframe").count() == 0
    links = answer.locator("a").evaluate_all("nodes => nodes.map(n => n.protocol)")
    assert links
    assert set(links) == {"https:"}
    assert page.evaluate(
        "[...document.querySelectorAll('#messages *')].every("
        "n => [...n.attributes].every(a => !a.name.startsWith('on')))"
    )
    page.locator(".message.user button", has_text="Edit").click()
    page.keyboard.press("Escape")
    page.reload()
    page.wait_for_selector(".message.assistant")
    assert page.evaluate("window.hacked") is None


def test_long_nests_and_unclosed_marks_end(server: PageServer, open_page: Opener) -> None:
    server.answers = [
        [{"content": s}] for s in ("[" * 7000, "**a" * 2500, "> " * 3000 + "x", "- " * 2000 + "x", "`" * 7000)
    ]
    page = open_page()
    for n in range(5):
        ask(page, "Go")
        assert answered(page, n + 1).locator(".content").inner_text()


def test_reasoning_is_folded_and_calls_get_results(server: PageServer, open_page: Opener) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    pieces = [
        {"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"city": ', '"Graz"}')
    ]
    server.answers = [
        [{"reasoning_content": "Hm, "}, {"reasoning_content": "a tool."}, {"tool_calls": [call]}, *pieces]
    ]
    page = open_page()
    ask(page, "Weather?")
    answer = answered(page)
    assert answer.locator(".reasoning").get_attribute("open") is None
    assert answer.locator(".reasoning > div").text_content() == "Hm, a tool."
    assert answer.locator(".call header code").inner_text() == "weather"
    assert json.loads(answer.locator(".call pre").inner_text()) == {"city": "Graz"}
    server.answers = [[{"content": "It rains."}]]
    answer.locator(".results textarea").fill("rain")
    answer.locator(".results button").click()
    assert answered(page, 2).locator(".content").inner_text() == "It rains."
    assert server.bodies[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Graz"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "rain"},
    ]


def test_stop_continue_regenerate_and_branches(server: PageServer, open_page: Opener) -> None:
    server.hold = True
    server.answers = [[{"content": "One two"}, {"content": " never"}]]
    page = open_page()
    ask(page, "Count")
    page.wait_for_selector("text=One two")
    page.keyboard.press("Escape")
    answer = answered(page)
    assert answer.locator(".content").inner_text() == "One two"
    assert "stopped" in answer.locator(".figures").inner_text()
    assert server.left.wait(60), "the request goes on"
    server.release.set()
    server.answers = [[{"content": " three"}]]
    answer.get_by_role("button", name="Continue").click()
    page.wait_for_selector("text=One two three")
    answered(page)
    assert server.bodies[1]["messages"][-1] == {"role": "assistant", "content": "One two"}
    assert server.bodies[1]["continue_final_message"] is True
    server.answers = [[{"content": "Another."}]]
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_selector("text=Another.")
    answered(page)
    assert page.locator(".branches").inner_text().split() == ["‹", "2/2", "›"]
    page.get_by_role("button", name="‹").click()
    assert page.locator(".message.assistant .content").inner_text() == "One two three"


def test_an_edited_question_is_a_branch(server: PageServer, open_page: Opener) -> None:
    server.answers = [[{"content": "A"}], [{"content": "B"}]]
    page = open_page()
    ask(page, "First")
    answered(page)
    page.locator(".message.user button", has_text="Edit").click()
    page.locator("textarea.edit").fill("Second")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Second")
    assert answered(page).locator(".content").inner_text() == "B"
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "Second"}]
    page.get_by_role("button", name="‹").click()
    assert page.locator(".message.user .content").inner_text() == "First"
    assert page.locator(".message.assistant .content").inner_text() == "A"


def test_conversations_are_kept_found_exported_and_imported(
    server: PageServer, open_page: Opener, tmp_path: Path
) -> None:
    server.answers = [[{"content": "About zebras."}], [{"content": "About whales."}]]
    page = open_page()
    ask(page, "Stripes")
    answered(page)
    page.keyboard.press("Control+Shift+O")
    ask(page, "Sea")
    answered(page)
    assert page.locator("#conversations a").all_inner_texts() == ["Sea", "Stripes"]
    page.fill("#search", "zebra")
    assert page.locator("#conversations a").all_inner_texts() == ["Stripes"]
    page.locator("#conversations a").click()
    assert page.locator(".message.assistant .content").inner_text() == "About zebras."
    page.reload()
    assert page.locator(".message.assistant .content").inner_text() == "About zebras."
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    page.fill("#search", "")
    page.locator(".entry", has_text="Stripes").hover()
    page.get_by_role("button", name="Delete Stripes").click()
    page.locator("#confirm .primary").click()
    page.wait_for_function("() => document.querySelectorAll('#conversations a').length === 1")
    page.set_input_files("#import-file", file)
    page.wait_for_selector("text=2 conversations imported.")
    assert page.locator("#conversations a").all_inner_texts() == ["Sea", "Sea", "Stripes"]
    (tmp_path / "bad.json").write_text('{"format": "else"}')
    page.set_input_files("#import-file", tmp_path / "bad.json")
    page.wait_for_selector("text=this is no export")


def test_two_tabs_keep_each_others_conversations(server: PageServer, open_page: Opener) -> None:
    page = open_page()
    other = page.context.new_page()
    other.goto(server.url)
    other.wait_for_selector("body[data-state=ready]")
    for tab, text in ((page, "One"), (other, "Two"), (page, "Three")):
        tab.click("#new-chat")
        ask(tab, text)
        answered(tab)
    for tab in (page, other):
        tab.reload()
        assert sorted(tab.locator("#conversations a").all_inner_texts()) == ["One", "Three", "Two"]


def test_settings_are_sent_and_kept(server: PageServer, open_page: Opener) -> None:
    page = open_page()
    page.keyboard.press("Control+,")
    assert page.locator("#set-temperature").get_attribute("placeholder") == "0.8"
    for name, value in {"temperature": "0.3", "top_k": "7", "seed": "5", "dry_multiplier": "0.8"}.items():
        page.fill(f"#set-{name}", value)
    page.fill("#set-system", "Be brief.")
    page.fill("#set-stop", "END\nSTOP")
    page.select_option("#set-thinking", "off")
    page.select_option("#set-speculative", "auto")
    page.fill("#set-tools", '[{"type": "function", "function": {"name": "f"}}]')
    page.keyboard.press("Escape")
    page.reload()
    page.wait_for_selector("body[data-state=ready]")
    ask(page, "Hi")
    answered(page)
    body = server.bodies[0]
    assert {
        key: body[key] for key in ("temperature", "top_k", "seed", "dry_multiplier", "stop", "speculative")
    } == {
        "temperature": 0.3,
        "top_k": 7,
        "seed": 5,
        "dry_multiplier": 0.8,
        "stop": ["END", "STOP"],
        "speculative": "auto",
    }
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["tools"][0]["function"]["name"] == "f"
    assert "top_p" not in body
    page.keyboard.press("Control+,")
    page.fill("#set-tools", "[broken")
    page.keyboard.press("Escape")
    ask(page, "Hi")
    page.wait_for_selector("#notice >> text=Tools")
    assert len(server.bodies) == 1


def test_errors_are_shown_and_the_page_goes_on(server: PageServer, open_page: Opener) -> None:
    server.answers = [
        [{"content": "Half"}, {"error": {"message": "the engine has ended"}}],
        [{"content": "Fine."}],
    ]
    page = open_page()
    ask(page, "Hi")
    page.wait_for_selector(".error >> text=the engine has ended")
    assert page.locator(".message.assistant .content").inner_text() == "Half"
    ask(page, "Again")
    assert answered(page, 2).locator(".content").inner_text() == "Fine."


def test_a_key_is_asked_for(open_page: Opener) -> None:
    guarded = PageServer(key="secret")
    try:
        page = open_page(guarded.url, strict=False)
        page.wait_for_selector("#notice >> text=API key")
        page.click("#open-settings")
        page.fill("#set-key", "secret")
        page.keyboard.press("Escape")
        page.wait_for_selector("body[data-state=ready]")
        ask(page, "Hi")
        assert answered(page).locator(".content").inner_text() == "Well."
    finally:
        guarded.close()


def test_the_crew_is_shown_live(open_page: Opener) -> None:
    page = open_page()
    page.keyboard.press("Control+j")
    page.wait_for_selector("#crew .device")
    assert page.locator(".device strong").all_inner_texts() == ["cuda:0", "cuda:1", "cpu"]
    assert page.locator(".device .big").all_inner_texts() == ["60.0 %", "30.0 %", "10.0 %"]
    text = page.locator("#crew-body").inner_text()
    for figure in (
        "120 used",
        "60 shared",
        "120 cached",
        "212 free",
        "75 % of all prompt",
        "2 running, 1 waiting",
        "accepted",
    ):
        assert figure in text, figure
    page.wait_for_selector("text=50.0")
    assert page.locator("#crew-body .curve").count() == 1
    page.click("#close-crew")
    assert page.locator("#crew").is_hidden()


def test_a_phone_has_no_sideways_scroll_and_both_themes_differ(server: PageServer, open_page: Opener) -> None:
    server.answers = [
        [{"content": "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n|" + "a|" * 30 + "\n|" + "-|" * 30}]
    ] * 2
    colors = set()
    for scheme in ("light", "dark"):
        page = open_page(width=390, scheme=scheme)
        ask(page, "Wide " * 50)
        answered(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.querySelector('#messages').scrollWidth") <= 390
        page.click("#open-sidebar")
        page.wait_for_function("() => document.querySelector('#sidebar').getBoundingClientRect().left === 0")
        page.click("#close-sidebar")
        colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#toggle-theme")
        colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colors) == 2


@pytest.mark.slow
def test_against_the_real_server(open_page: Opener) -> None:
    flags = (
        "-c",
        "1024",
        "-np",
        "2",
        "-t",
        "1",
        "--seed",
        "42",
        "--device",
        "cpu,cpu",
        "-sm",
        "tensor",
        "-ts",
        "3,1",
    )
    with RunningServer(*flags) as real:
        real.wait_until_ready()
        page = open_page(real.url, strict=False)
        page.wait_for_selector("body[data-state=ready]")
        page.click("#toggle-crew")
        page.wait_for_selector("#crew .device")
        assert page.locator(".device strong").all_inner_texts() == ["cpu#0", "cpu#1"]
        ask(page, "What is 2 + 3?")
        assert "5" in answered(page).locator(".content").inner_text()
        page.wait_for_selector(".figures")
        policy = real.get("/").headers["content-security-policy"]
        assert policy.startswith("default-src 'self'")
        assert real.get("/").text.startswith("<!doctype html>")
