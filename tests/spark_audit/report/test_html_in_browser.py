"""The audit's report in a real browser: everything is there and works, nothing leaves the page, everybody can read it.

The fixture ``opened`` fails every test whose page wrote to the console or asked for anything but itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.effort import at_length

pytestmark = pytest.mark.browser
MAKERS = ("ordinary", "extreme", "empty", "tiny", "clean", "late", "inconclusive", "inconsistent")
SECTIONS = ("throughput", "heatmap", "lateness", "retries", "dead", "ledgers", "health", "findings")
PICTURES = (
    "throughput-bars", "at-once-bars", "heatmap-fields", "lateness-lines", "lateness-histogram", "ladder-0",
    "dead-bars", "health-strips",
)  # fmt: skip
BYTES_MAX = 3_000_000

# Everything that must have a name for people who cannot see it, and has none.
NAMELESS = """() => {
  const text = (ids) => ids.split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join("");
  const named = (e) => (e.getAttribute("aria-label") || text(e.getAttribute("aria-labelledby") ?? "")).trim();
  const bad = [];
  for (const e of document.querySelectorAll("svg, img, [role=img], [role=region], [role=group]"))
    if (!e.closest("[aria-hidden=true]") && !named(e)) bad.push(e.outerHTML.slice(0, 90));
  for (const e of document.querySelectorAll("input, select")) if (!e.labels.length) bad.push(e.id);
  for (const e of document.querySelectorAll("button, a, summary")) if (!e.textContent.trim()) bad.push(e.outerHTML);
  for (const e of document.querySelectorAll("table")) {
    if (!e.caption?.textContent.trim()) bad.push("a table without a caption");
    if ([...e.querySelectorAll("th")].some((each) => !each.scope)) bad.push("a heading without a scope");
  }
  if (!document.documentElement.lang || !document.title) bad.push("the page");
  if (document.querySelectorAll("h1").length !== 1) bad.push("not one h1");
  let level = 1;
  for (const e of document.querySelectorAll("h1, h2, h3")) {
    if (+e.tagName[1] > level + 1) bad.push("a level of headings is left out: " + e.textContent);
    level = +e.tagName[1];
  }
  return bad;
}"""

# Texts whose contrast with what lies behind them is less than 4.5 : 1 (3 : 1 from 24 px on).
PALE = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below, alpha) => top.slice(0, 3).map((each, at) => each * alpha + below[at] * (1 - alpha));
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => { const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
    if (c[3] > 0.99) return c.slice(0, 3); } return [255, 255, 255]; };
  const bad = new Set();
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest("#tip, .unseen, script, title, desc")) continue;
    if (e.closest(".letters_marks, .swatch")) continue;  // stands on a fill
    const isSvg = e.namespaceURI.endsWith("svg");
    if (isSvg && getComputedStyle(e).stroke !== "none") continue;  // has a halo of its own
    const style = getComputedStyle(e), ground = behind(isSvg ? e.closest("svg").parentElement : e);
    const ink = rgba(isSvg ? style.fill : style.color);
    let alpha = ink[3];
    for (let up = e; up; up = up.parentElement) alpha *= +getComputedStyle(up).opacity;
    const a = light(over(ink, ground, alpha)), b = light(ground);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5))
      bad.add(`${ratio.toFixed(2)} ${e.tagName}.${e.getAttribute("class")} ${e.textContent.slice(0, 30)}`);
  }
  return [...bad];
}"""
# What of text in a drawing is cut off by its edge.
CUT = """() => [...document.querySelectorAll("main svg text")].filter((e) => {
  const frame = e.closest("svg").getBoundingClientRect(), box = e.getBoundingClientRect();
  return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
    || box.bottom > frame.bottom + 1);
}).map((e) => e.textContent)"""


@pytest.mark.parametrize("name", MAKERS)
def test_every_section_is_there(seen: Callable[..., Any], name: str) -> None:
    """The band, then all sections, whatever the input is; each has something to see."""
    page: Page = seen(name).page
    expect(page.locator("header.band h1")).to_be_visible()
    found = page.locator("main > section").evaluate_all("all => all.map(each => [each.id, each.offsetHeight])")
    assert [section for section, _ in found] == list(SECTIONS)
    assert all(height > 60 for _, height in found)
    assert page.locator("nav a").evaluate_all("all => all.every(each => document.querySelector(each.hash))")


@pytest.mark.parametrize("name", ["ordinary", "extreme"])
def test_every_picture_is_there_and_whole(seen: Callable[..., Any], name: str) -> None:
    """It has a size, shapes in it, and no text that its edge cuts off."""
    page: Page = seen(name).page
    for picture in PICTURES:
        drawing = page.locator(f"#{picture}-svg")
        box = drawing.bounding_box()
        assert box is not None, picture
        assert box["width"] > 300
        assert box["height"] > 60
        assert drawing.locator("rect, path, line").count() > 3
    assert page.evaluate(CUT) == []


@pytest.mark.parametrize("name", ["ordinary", "extreme", "empty", "tiny"])
def test_the_body_never_scrolls_sideways(seen: Callable[..., Any], name: str) -> None:
    """Wide pictures and tables scroll in their own frames, with every finding unfolded as well."""
    page: Page = seen(name).page
    page.evaluate("document.querySelectorAll('details:nth-of-type(-n+30)').forEach(each => each.open = true)")
    for width in (380, 800, 1280, 2200):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", ["ordinary", "extreme", "empty"])
def test_everything_has_a_name(seen: Callable[..., Any], name: str) -> None:
    """Drawings, regions, fields, buttons, tables; and headings leave no level out."""
    assert seen(name).page.evaluate(NAMELESS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "extreme"])
def test_text_can_be_read(seen: Callable[..., Any], name: str, scheme: str) -> None:
    """At least 4.5 : 1 against what lies behind it."""
    page: Page = seen(name, color_scheme=scheme).page
    page.evaluate("document.querySelectorAll('details:nth-of-type(-n+9)').forEach(each => each.open = true)")
    assert page.evaluate(PALE) == []


def test_the_heat_map_does_not_speak_by_colour_alone(seen: Callable[..., Any]) -> None:
    """What is not clean has a letter in its field, and the legend says which."""
    page: Page = seen("ordinary").page
    letters = page.locator("#heatmap .letters_marks text").all_text_contents()
    assert {"L", "T"} <= set(letters) <= {"L", "T", "t", "?"}
    fills = ("var(--lost)", "var(--late)", "var(--few)", "url(#p-unsure)")
    bad = page.locator(", ".join(f'#heatmap-fields-svg path[fill="{fill}"]' for fill in fills))
    assert len(letters) == bad.count()
    assert "lost" in page.locator("#heatmap .legend").inner_text()


def test_pointing_at_a_field_shows_its_counts(opened: Callable[..., Any]) -> None:
    """Topic, time, verdict and numbers, within the window; gone when the pointer is gone."""
    page: Page = opened("ordinary").page
    field = page.locator('#heatmap-fields-svg path[fill="var(--lost)"]').first
    field.scroll_into_view_if_needed()
    field.hover()
    tip = page.locator("#tip")
    expect(tip).to_contain_text("orders")
    expect(tip).to_contain_text("UTC")
    expect(tip).to_contain_text("lost 3")
    box = tip.bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= 1280 - box["width"]
    page.mouse.move(2, 2)
    expect(tip).to_be_hidden()


def test_the_keyboard_reaches_every_field(opened: Callable[..., Any]) -> None:
    """Tab to a picture, arrows from field to field, Escape back out; the skip link comes first."""
    page: Page = opened("ordinary").page
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    drawing = page.locator("#heatmap-fields-svg")
    drawing.focus()
    tip = page.locator("#tip")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "End"):
        page.keyboard.press(key)
        expect(tip).to_be_visible()
        said.append(tip.inner_text().splitlines()[:2])
    assert said[0] == said[4]
    assert said[0][0] == said[1][0]
    assert said[1][1] == said[2][1]
    assert said[2][0] != said[1][0]
    assert said[2][1] != said[3][1]
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    expect(drawing).to_be_focused()


def test_findings_are_filtered_and_folded(opened: Callable[..., Any]) -> None:
    """By kind and by text together; folding touches what is shown."""
    page: Page = opened("ordinary").page
    shown = page.locator(".finding:visible")
    expect(shown).to_have_count(104)
    page.locator("#filter-kind").select_option("LOST")
    expect(shown).to_have_count(9)
    page.locator("#filter-text").fill("PAYMENTS")
    expect(shown).to_have_count(2)
    expect(page.locator("#filter-count")).to_have_text("2 of 104 shown")
    page.get_by_role("button", name="Unfold all").click()
    expect(page.locator(".finding[open]")).to_have_count(2)
    expect(shown.first.locator("table")).to_contain_text("SCHEDULED")
    page.locator("#filter-kind").select_option("")
    page.locator("#filter-text").fill("")
    expect(page.locator(".finding[open]")).to_have_count(2)
    page.get_by_role("button", name="Fold all", exact=True).click()
    expect(page.locator(".finding[open]")).to_have_count(0)
    page.locator("#filter-text").fill("nothing has this")
    expect(page.locator("#filter-count")).to_have_text("0 of 104 shown")


def test_a_finding_unfolds_by_keyboard(opened: Callable[..., Any]) -> None:
    """A summary is a button of the browser's own."""
    page: Page = opened("ordinary").page
    page.locator(".finding summary").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".finding").first.locator("table")).to_be_visible()


def test_without_script_all_is_there_but_the_filter(opened: Callable[..., Any]) -> None:
    """Pictures, tables, findings and their folding; fields say their words the browser's own way."""
    page: Page = opened("ordinary", java_script_enabled=False).page
    expect(page.locator(".filter")).to_be_hidden()
    expect(page.locator("#heatmap-fields-svg")).to_be_visible()
    assert "orders" in (page.locator("#heatmap-fields-svg path > title").first.text_content() or "")
    finding = page.locator(".finding").first
    finding.locator("summary").click()
    expect(finding.locator("table")).to_be_visible()


def test_hostile_names_are_text(opened: Callable[..., Any]) -> None:
    """They are seen as they are written; no script of theirs runs, no image is asked for (the fixture watches)."""
    page: Page = opened("extreme").page
    assert page.locator("img, iframe, object, embed").count() == 0
    expect(page.locator("#retries")).to_contain_text('<script>alert("1")</script>')
    page.get_by_role("button", name="Unfold all").click()
    expect(page.locator(".finding").first).to_contain_text("<img src=x onerror=alert(2)>")


def test_the_policy_holds_in_the_browser(opened: Callable[..., Any]) -> None:
    """Even a script that got into the page would not run."""
    watched = opened("tiny")
    added = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);"
    assert watched.page.evaluate(f"() => {{ {added} return window.ran ?? 0; }}") == 0
    watched.page.wait_for_function("() => true")
    assert any("Content Security Policy" in line for line in watched.wrong)
    watched.wrong.clear()


def test_it_prints(opened: Callable[..., Any]) -> None:
    """On white, without navigation and filter, no wider than the sheet."""
    page: Page = opened("ordinary", 1000, color_scheme="dark").page
    page.emulate_media(media="print")
    expect(page.locator("nav")).to_be_hidden()
    expect(page.locator(".filter")).to_be_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_the_largest_report_is_small_enough(pages: Callable[[str], Path]) -> None:
    """1 500 windows of 240 topics, 1 500 findings with long histories: under 3 MB. Needs no browser."""
    assert pages("extreme").stat().st_size < BYTES_MAX


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1280),
        ("dark", 380),
        *(pytest.param(*each, marks=at_length) for each in (("light", 380), ("dark", 1280))),
    ],
)
@pytest.mark.parametrize("name", ["ordinary", pytest.param("extreme", marks=at_length), "empty"])
def test_screenshots(seen: Callable[..., Any], tmp_path: Path, name: str, scheme: str, width: int) -> None:
    """For people: the whole page as a picture in the test's folder."""
    page: Page = seen(name, width, color_scheme=scheme).page
    path = tmp_path / f"{name}-{scheme}-{width}.png"
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": width, "height": 6000}, full_page=True)
    assert path.stat().st_size > 20_000
