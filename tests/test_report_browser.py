"""The page in a real browser: filters, sorting, narrow screens, keyboard, no errors."""

import importlib.util
import shutil

import pytest

from bench import report
from bench.harness import records
from bench.reports import plots, sources
from tests.measured import made
from tests.tables import table

NAMES = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
# The page is opened wherever there is something to open it with.
WHY_NOT = None
if importlib.util.find_spec("playwright") is None:
    WHY_NOT = "playwright is not installed: pip install 'native-sparse-attention[browser]'"
elif EXECUTABLE is None:
    WHY_NOT = f"no browser: none of {NAMES} is on the path"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a page with failed rows, long reasons, plots and hostile text."""
    folder = tmp_path_factory.mktemp("report")
    rows = made(table("test_report")["browser"])
    records.append(folder / "rows.jsonl", rows)
    found = sources.read([folder / "rows.jsonl"], "Title <b>bold</b>")
    text = report.html(found, plots.plots(found.records, folder))
    (folder / "report.html").write_text(text, encoding="utf-8")
    return (folder / "report.html").as_uri(), len(rows)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = {"executable_path": EXECUTABLE, "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**options)
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["wide", "narrow"])
def opened(browser, address, request):
    """The page and its number of rows; nothing is fetched and nothing goes wrong."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.set_default_timeout(5000)
    tab, errors, requests = context.new_page(), [], []
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("dialog", lambda dialog: errors.append(dialog.message))
    tab.on("request", lambda asked: requests.append(asked.url))
    tab.goto(address[0])
    yield tab, address[1]
    context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith("data:")] == [address[0]]


def visible(tab):
    return tab.locator("#rows tbody tr:visible")


def test_filters(opened):
    tab, total = opened
    assert tab.text_content("#count") == f"{total} of {total} rows"
    tab.select_option("select[name=branch]", "sliding")
    assert visible(tab).count() == 4 and tab.text_content("#count") == f"4 of {total} rows"
    tab.select_option("select[name=implementation]", "fa2")
    assert visible(tab).count() == 2
    tab.fill("input[name=text]", "FA2 t=1024")
    assert visible(tab).count() == 1 and "3x" in visible(tab).text_content()
    tab.fill("input[name=text]", "nothing like it")
    assert visible(tab).count() == 0
    tab.click("button[type=reset]")
    tab.wait_for_function(f"document.querySelector('#count').textContent[0] == '{total}'[0]")
    assert visible(tab).count() == total
    tab.select_option("select[name=status]", "oom")
    assert visible(tab).count() == 1 and "unbroken" in visible(tab).text_content()
    tab.click("button[type=reset]")
    tab.select_option("select[name=device]", "Other")
    tab.select_option("select[name=framework]", "jax")
    tab.select_option("select[name=mode]", "forward")
    assert visible(tab).count() == 1 and "mosaic" in visible(tab).text_content()


def test_sorting_by_keyboard_and_mouse(opened):
    tab, total = opened

    def ms():
        names = tab.locator("#rows tbody td[data-label=ms]")
        values = names.evaluate_all("cells => cells.map(cell => cell.dataset.v)")
        return [float(value) for value in values if value], values

    head = tab.locator("#rows th", has=tab.get_by_role("button", name="ms", exact=True))
    button = head.get_by_role("button")
    button.focus()
    tab.keyboard.press("Enter")
    up, texts = ms()
    assert up == sorted(up) and len(set(up)) > 2 and len(texts) == total
    assert texts[-2:] == ["", ""], "rows without a time stand last"
    assert head.get_attribute("aria-sort") == "ascending"
    button.click()
    down, texts = ms()
    assert down == up[::-1] and texts[-2:] == ["", ""]
    assert head.get_attribute("aria-sort") == "descending"
    assert tab.locator("#rows th[aria-sort]").count() == 1


def test_nothing_is_wider_than_the_screen(opened):
    tab, _ = opened
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not tab.evaluate(wide)
    for details in tab.locator("details").all():
        details.evaluate("x => x.open = true")
    assert not tab.evaluate(wide)
    inside = "x => x.scrollWidth <= x.clientWidth + 1"
    assert tab.locator("#rows .scroll").evaluate(inside), "the rows fit without scrolling"


def test_the_answer_stands_first(opened):
    """The chart is the first section; each drawing lies within its card, none over another."""
    tab, _ = opened
    assert tab.locator("section").first.get_attribute("id") == "crossover"
    assert "forward from 1k tokens (6x)" in tab.text_content(".lead")
    boxes = [each.bounding_box() for each in tab.locator(".answers figure").all()]
    width = tab.viewport_size["width"]
    assert len(boxes) == 4 and all(0 <= b["x"] and b["x"] + b["width"] <= width for b in boxes)
    same_line = {box["y"] for box in boxes}
    assert len(same_line) == (1 if width == 1280 else 4)
    card, drawing = boxes[0], tab.locator(".answers svg").bounding_box()
    assert drawing["width"] > 200 and card["x"] < drawing["x"]
    assert drawing["x"] + drawing["width"] < card["x"] + card["width"]
    texts = tab.locator(".answers svg text").all()
    assert all(text.bounding_box()["height"] >= 9 for text in texts), "large enough to read"


def test_it_can_be_read(opened):
    """Text stands out from what is behind it, and the plots take the text's colour."""
    tab, _ = opened
    ratio = """element => {
      const light = color => {
        const [r, g, b] = color.match(/[\\d.]+/g).map(Number).slice(0, 3).map(x => x / 255)
          .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      let behind = element;
      while (getComputedStyle(behind).backgroundColor.endsWith(", 0)")) {
        behind = behind.parentElement;
      }
      const [a, b] = [light(getComputedStyle(element).color),
                      light(getComputedStyle(behind).backgroundColor)];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }"""
    for selector in (
        "h1",
        "p.soft",
        "td .sub",
        ".answers .yes",
        ".answers .sub",
        ".badge.ok",
        ".badge.wrong",
        ".badge.oom",
        "a",
    ):
        assert tab.locator(selector).first.evaluate(ratio) >= 4.5, selector
    ink = "x => getComputedStyle(x).fill + getComputedStyle(document.body).color"
    fill = tab.locator("figure svg text").first.evaluate(ink)
    assert fill[: len(fill) // 2] == fill[len(fill) // 2 :]
    assert tab.title() == "Title <b>bold</b>" and tab.locator("h1 b").count() == 0
