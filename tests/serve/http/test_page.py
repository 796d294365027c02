"""The server's page in a real browser without a window, in front of a server that answers by heart.

The browser is `chromium`, or what `AXON_BROWSER` names; CI names it, so that there a missing one fails.
"""

import os
import shutil

import pytest

from tests.serve.http.canned import Script, serving

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def browser():
    name = os.environ.get("AXON_BROWSER")
    path = shutil.which(name or "chromium")
    if name and not path:
        pytest.fail(f"AXON_BROWSER is {name}, which is not found")
    if not path:
        pytest.skip("needs the browser chromium, or another like it that AXON_BROWSER names")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.fixture
def script(server):
    server.script = Script()
    yield server.script
    server.script.gone.set()


@pytest.fixture
def visit(browser, server, script):
    """visit(**options): the page by itself; at the end nothing was wrong in it, and no other host was asked."""
    opened = []

    def open_page(width=1280, height=800, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        page = context.new_page()
        page.set_default_timeout(10_000)
        wrong, asked = [], []
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        opened.append((context, wrong, asked))
        page.goto(server.url)
        if not script.key:
            page.wait_for_selector("select[name=model] option", state="attached")
        return page

    yield open_page
    refused = "the server responded with a status of 40"  # the browser notes what a test made the server refuse
    for context, wrong, asked in opened:
        context.close()
        assert not [line for line in wrong if refused not in line or line.count("404")]
        assert all(url.startswith((server.url, "data:")) for url in asked)


def say(page, text):
    """Write and send by the keyboard alone: the message has the focus."""
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def ended(page, status="Done."):
    page.wait_for_function("text => document.getElementById('status').textContent === text", arg=status)


def answer(page) -> str:
    return page.locator(".answer").last.text_content()


def test_a_message_sent_by_the_keyboard_is_answered_in_order(visit, script, rng):
    script.pieces = [f"{word} ö€😀 " for word in rng.integers(1000, size=200)]
    page = visit()
    say(page, "Hello")
    ended(page)
    assert answer(page) == "".join(script.pieces)
    assert script.asked[0][0] == "/v1/chat/completions"
    assert script.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]
    assert script.bodies[0]["model"] == "tiny"
    assert script.bodies[0]["stream"] is True
    assert "4 tokens" in page.locator(".foot").text_content()


def test_the_next_message_brings_what_was_said_and_again_takes_the_last_answer_back(visit, script):
    page = visit()
    page.get_by_role("textbox", name="System message").fill("Be brief.")
    page.get_by_label("Message", exact=True).focus()
    say(page, "One")
    ended(page)
    say(page, "Two")
    page.wait_for_function("() => document.querySelectorAll('.turn:not([aria-busy])').length === 2")
    roles = [(message["role"], message["content"]) for message in script.bodies[1]["messages"]]
    said = ("system", "Be brief."), ("user", "One"), ("assistant", "Well, it works."), ("user", "Two")
    assert roles == [*said]
    page.get_by_role("button", name="Again").press("Enter")
    ended(page)
    assert script.bodies[2] == script.bodies[1]
    assert page.locator(".turn").count() == 2


def test_shift_and_enter_begin_a_line(visit, script):
    page = visit()
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    say(page, "Two")
    ended(page)
    assert script.bodies[0]["messages"][0]["content"] == "One\nTwo"


def test_what_looks_like_markup_stays_text(visit, script):
    script.pieces = ["<img src=x onerror=alert(1)>\n```html\n<b>", "bold</b>\n``", "`\n<i>after</i>"]
    page = visit()
    say(page, "<script>alert(1)</script>")
    ended(page)
    assert page.locator(".asked").text_content() == "<script>alert(1)</script>"
    assert page.locator(".answer *").evaluate_all("all => all.map(e => e.tagName + ' ' + e.textContent)") == [
        "DIV <img src=x onerror=alert(1)>",
        "PRE <b>bold</b>",
        "DIV <i>after</i>",
    ]


@pytest.mark.parametrize("by", ["Escape", "the button"])
def test_an_answer_is_stopped_and_what_came_of_it_stays(visit, script, by):
    script.endless = True
    page = visit()
    say(page, "Hello")
    page.wait_for_function("() => document.querySelector('.answer')?.textContent === 'Well, it works.'")
    if by == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").press("Enter")
    ended(page, "Stopped.")
    assert script.gone.wait(5), "the server sees that the reader has gone"
    assert answer(page) == "Well, it works."
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_settings_reach_the_server_and_empty_ones_do_not(visit, script, rng):
    settings = {
        "max_tokens": ("Tokens", int(rng.integers(1, 5000))),
        "temperature": ("Temperature", round(float(rng.random()), 3)),
        "top_p": ("Top p", round(float(rng.random()), 3)),
        "top_k": ("Top k", int(rng.integers(1, 100))),
        "min_p": ("Min p", round(float(rng.random()), 3)),
        "seed": ("Seed", int(rng.integers(2**53))),
        "repetition_penalty": ("Repetition", 1.25),
        "presence_penalty": ("Presence", -1.5),
        "frequency_penalty": ("Frequency", 0.5),
    }
    page = visit()
    say(page, "Hello")
    ended(page)
    assert settings.keys() & script.bodies[0].keys() == {"max_tokens"}
    for label, value in settings.values():
        page.get_by_label(label).fill(str(value))
    page.get_by_label("API key").fill("s3cret")
    page.reload()
    page.wait_for_selector("select[name=model] option", state="attached")
    say(page, "Hello")
    ended(page)
    _, body, authorization = script.asked[1]
    assert {name: body[name] for name in settings} == {name: value for name, (_, value) in settings.items()}
    assert authorization == "Bearer s3cret"
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_a_setting_out_of_range_is_shown_and_not_sent(visit, script):
    page = visit(width=360)
    page.locator("#sampling summary").click()
    page.get_by_label("Top p").fill("1.5")
    page.locator("#sampling summary").click()
    page.get_by_label("Message", exact=True).focus()
    say(page, "Hello")
    assert page.evaluate("document.activeElement.name") == "top_p"
    assert not script.asked


def test_a_model_without_a_template_continues_a_text_and_goes_on(visit, script):
    page = visit()
    page.get_by_role("combobox", name="Model").select_option("base")
    assert page.get_by_label("Chat").is_disabled()
    page.get_by_label("Text to continue").focus()
    say(page, "def main(")
    ended(page)
    path, body, _ = script.asked[0]
    assert (path, body["prompt"], body["model"]) == ("/v1/completions", "def main(", "base")
    assert page.locator(".plain").text_content() == "def main(Well, it works."
    page.get_by_role("button", name="Continue").press("Enter")
    ended(page)
    assert script.bodies[1]["prompt"] == "def main(Well, it works."


def test_an_error_is_shown_in_the_servers_words_and_nothing_is_lost(visit, script):
    script.error = 400, "the prompt has 9000 tokens; the model has 4096 positions: shorten it"
    page = visit()
    say(page, "Hello")
    ended(page, "Failed.")
    assert page.get_by_role("alert").text_content() == script.error[1]
    assert page.get_by_label("Message", exact=True).input_value() == "Hello"
    script.error = None
    page.keyboard.press("Enter")
    ended(page)
    assert page.locator(".error:visible").count() == 0
    assert len(script.bodies[1]["messages"]) == 1


def test_without_a_key_the_page_says_so_and_with_it_goes_on(visit, script):
    script.key = "s3cret"
    page = visit(width=360)
    page.get_by_role("alert").filter(has_text="No valid key").wait_for()
    page.get_by_label("API key").fill("s3cret")
    page.keyboard.press("Tab")
    page.wait_for_selector("select[name=model] option", state="attached")
    assert page.locator(".error:visible").count() == 0


@pytest.mark.parametrize("ending", [b"", b'data: {"error": {"message": "the engine stopped"}}\n\n'])
def test_an_answer_that_breaks_off_says_so_and_stays(visit, script, ending):
    script.ending = ending
    page = visit()
    say(page, "Hello")
    ended(page, "Failed.")
    assert answer(page) == "Well, it works."
    told = "the engine stopped" if ending else "The connection ended before the answer did."
    assert page.get_by_role("alert").text_content() == told


def test_the_engines_state_is_shown(visit):
    page = visit()
    page.wait_for_function("() => document.getElementById('spark').getAttribute('points')?.split(' ').length > 1")
    shown = page.locator("#engine dd:not([aria-hidden])").all_text_contents()
    assert shown == ["842", "3", "1", "128 of 512", "62 %", "120 ms", "18 ms"]
    assert page.locator("#summary").text_content() == "3 running · 1 waiting · 842 tokens/s"


@pytest.mark.parametrize("width", [320, 360, 801])
def test_no_width_scrolls_sideways(visit, script, width):
    script.pieces = ["x" * 500, "\n```\n", "y" * 500, "\n```\n"]
    page = visit(width=width, height=640)
    page.locator("#prompt").fill("z" * 500)
    page.keyboard.press("Enter")
    ended(page)
    page.locator("details").evaluate_all("all => all.forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.get_by_role("button", name="Send").is_visible()


def test_everything_is_reached_by_tab_in_the_order_in_which_it_stands(visit):
    page = visit()
    page.locator(".skip").focus()
    seen = []
    for _ in range(18):
        seen.append(page.evaluate("e => (e = document.activeElement).name || e.id || e.textContent"))
        page.keyboard.press("Tab")
    numbers = "max_tokens temperature seed top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
    before = ["Skip to the message", "model", "mode", "Settings", "system"]
    assert seen == [*before, *numbers.split(), "key", "Engine", "prompt", "clear"]


def test_every_field_has_a_name_for_those_who_do_not_see_it(visit):
    page = visit()
    unnamed = "all => all.filter(each => !each.labels?.length).map(each => each.outerHTML)"
    assert page.locator("input, select, textarea").evaluate_all(unnamed) == []
    assert page.locator("[role=log][aria-live=polite]").count() == 1


def test_nothing_moves_for_those_who_want_it_so(visit, script):
    script.endless = True
    page = visit(reduced_motion="reduce")
    say(page, "Hello")
    page.wait_for_selector("[aria-busy]")
    assert page.evaluate("document.getAnimations().length") == 0
    page.keyboard.press("Escape")
