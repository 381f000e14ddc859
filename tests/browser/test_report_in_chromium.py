"""Every page in a real browser: wide, on a phone, dark, printed. Pictures stay in pytest's temporary folder."""

import base64

import pytest
import report_samples as samples
from headless import Browser, executable
from tiny import TASK

from dovetail import experiment, pages
from dovetail.audit import curves
from dovetail.experiment import config
from dovetail.figures import Figure, Line
from dovetail.watching import LivePage

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(executable() is None, reason="needs Chromium"),
]

PAGES = ("run", "personal", "nothing", "live", "comparison", "paper", "index")
RUN = {
    "task": {"name": "tiny"},
    "protocol": {"name": "ss_topk", "clip_value": 0.3, "k": 3},
    "cohort": {"kind": "everyone", "rounds": 4},
    "privacy": {"eps": 3.0, "delta": 1e-5},
}


def trained(folder, *overrides):
    plan = experiment.prepare(config.parse(RUN, overrides), task=TASK)
    experiment.run(plan, out=folder, callbacks=[LivePage(folder / "live.html")])
    curves.write_audit(plan, folder)
    return pages.write(folder)


@pytest.fixture(scope="module")
def pages_drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    personal = ("protocol", {"name": "apes", "clip_value": 0.3, "budgets": [0.5, 2.0]})
    no_target = ("privacy", {"delta": 1e-5})
    papers = samples.index(folder / "papers")
    for name in ("flame", "apes"):
        pages.write_paper_page(papers / name)
    return {
        "run": trained(folder / "run"),
        "personal": trained(folder / "personal", personal, no_target),
        "live": folder / "run" / "live.html",
        "nothing": trained(folder / "nothing", ("protocol", {"name": "fedavg"}), no_target),
        "comparison": pages.write_comparison_page(samples.comparison(folder / "comparison")),
        "paper": papers / "flame" / "report.html",
        "index": pages.write_index_page(papers),
    }


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window_and_draws_its_figures(browser, pages_drawn, tmp_path, name, width):
    browser.open(pages_drawn[name], width=width)
    browser.picture(tmp_path / f"{name}-{width}.png")
    assert browser.complaints() == []
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect()).map(r => [r.width, r.height])"
    )
    assert bool(sizes) == (name != "index")
    folded = browser.evaluate("document.querySelectorAll('details:not([open]) svg').length")
    assert folded == 0
    for drawn in sizes:
        assert min(drawn) > 100
        assert drawn[0] <= width
    smallest = browser.evaluate(
        "Math.min(99, ...[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width / 440 * 13))"
    )
    assert smallest >= 9, "labels can be read"


@pytest.mark.parametrize("name", ["run", "comparison", "paper"])
def test_no_text_of_a_figure_lies_over_another_or_outside(browser, pages_drawn, name):
    browser.open(pages_drawn[name], width=1280)
    outside, touching = browser.evaluate(
        """(() => {
        let outside = [], touching = [];
        for (const svg of document.querySelectorAll('svg')) {
            const frame = svg.getBoundingClientRect();
            const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
            for (const [text, r] of texts)
                if (r.left < frame.left - 1 || r.right > frame.right + 1 || r.bottom > frame.bottom + 1)
                    outside.push(text);
            for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
                const [a, b] = [texts[i][1], texts[j][1]];
                const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
                const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
                if (wide > 1 && high > 4) touching.push([texts[i][0], texts[j][0]]);
            }
        }
        return [outside, touching];
        })()"""
    )
    assert outside == []
    assert touching == []


def test_the_overflow_check_can_fail(browser, tmp_path):
    page = tmp_path / "wide.html"
    page.write_text("<!doctype html><meta name=viewport content='width=device-width'><div style='width:800px'>x</div>")
    browser.open(page, width=390)
    assert browser.evaluate("document.scrollingElement.scrollWidth") > 390


def test_dark_and_light_differ_and_both_have_contrast(browser, pages_drawn, tmp_path):
    seen = {}
    for dark in (False, True):
        browser.open(pages_drawn["run"], width=1280, dark=dark)
        browser.picture(tmp_path / f"dark-{dark}.png")
        seen[dark] = browser.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, "
            "getComputedStyle(document.querySelector('svg .dt-title')).fill]"
        )
    assert seen[False][0] == "rgb(255, 255, 255)"
    for background, ink, title in seen.values():
        assert abs(_grey(background) - _grey(ink)) > 180
        assert abs(_grey(background) - _grey(title)) > 180
    assert _grey(seen[True][0]) < 60


def _grey(colour):
    red, green, blue = (float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return 0.3 * red + 0.59 * green + 0.11 * blue


def test_print_is_light_and_shows_what_is_folded(browser, pages_drawn, tmp_path):
    browser.open(pages_drawn["run"], width=1280, dark=True)
    browser.printed(tmp_path / "run.pdf")
    assert (tmp_path / "run.pdf").read_bytes().startswith(b"%PDF")
    browser.ask(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    hidden = browser.evaluate(
        "[...document.querySelectorAll('details:not([open]) > :not(summary)')]"
        ".filter(e => e.getBoundingClientRect().height < 1).length"
    )
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") > 2
    assert hidden == 0
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.ask("Emulation.setEmulatedMedia", media="", features=[])


def test_a_saved_figure_opens_alone(browser, tmp_path):
    from dovetail.figures import save

    figure = Figure(title="Alone", x_label="x", y_label="y", lines=[Line(name="one", x=[1, 2], y=[3.0, 4.0])])
    save(figure, tmp_path / "alone.svg")
    browser.open(tmp_path / "alone.svg", width=800)
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.getBoundingClientRect().height") > 100


def test_a_reviewer_can_tick_sign_and_follow_the_page(browser, pages_drawn):
    browser.open(pages_drawn["run"], width=390)
    boxes = browser.evaluate(
        """[...document.querySelectorAll('.boxes li')].map(li => {
            const box = li.querySelector('input'); box.click();
            const frame = box.getBoundingClientRect();
            return [box.checked, Math.min(frame.width, frame.height) >= 15, li.querySelector('.owner').innerText];
        })"""
    )
    assert len(boxes) > 5
    assert all(ticked and large and owner for ticked, large, owner in boxes)
    lines = browser.evaluate(
        """[...document.querySelectorAll('.declared tbody tr')].map(row => {
            const box = row.querySelector('input'); box.click();
            const range = document.createRange(), frame = box.getBoundingClientRect();
            range.selectNodeContents(row.querySelector('th'));
            const beside = frame.right <= range.getBoundingClientRect().left;
            return [box.checked, Math.min(frame.width, frame.height) >= 15, beside, row.cells.length];
        })"""
    )
    assert len(lines) >= 3
    assert all(line == [True, True, True, 4] for line in lines)
    fields = browser.evaluate("[...document.querySelectorAll('.sign thead th')].map(th => th.innerText.trim())")
    assert fields == ["", "Name", "Role", "Date", "Signature"]
    blank = "[...document.querySelectorAll('.sign td')].every(td => td.getBoundingClientRect().height >= 40)"
    assert browser.evaluate(blank), "room to write"
    lost = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.querySelector(a.hash)).length"
    assert browser.evaluate(lost) == 0


@pytest.mark.parametrize(("width", "row"), [(1280, True), (390, False)])
def test_the_picture_of_who_sees_what_follows_the_data(browser, pages_drawn, width, row):
    browser.open(pages_drawn["run"], width=width)
    frames = browser.evaluate(
        "[...document.querySelectorAll('.flow li')].map(li => li.getBoundingClientRect()).map(r => [r.left, r.top])"
    )
    assert len(frames) == 4
    across, down = zip(*frames, strict=True)
    along, apart = (across, down) if row else (down, across)
    assert list(along) == sorted(set(along))
    assert len(set(apart)) == 1


@pytest.mark.parametrize(("name", "width", "height"), [("A4", 8.27, 11.69), ("Letter", 8.5, 11.0)])
@pytest.mark.parametrize("page", ["run", "personal", "nothing"])
def test_no_table_is_cut_by_a_page_break(browser, pages_drawn, tmp_path, page, name, width, height):
    """Each table fits on one sheet, and print forbids to break it."""
    browser.open(pages_drawn[page], width=1280)
    data = browser.ask("Page.printToPDF", printBackground=True, paperWidth=width, paperHeight=height)["data"]
    (tmp_path / f"{page}-{name}.pdf").write_bytes(base64.b64decode(data))
    inner_width, inner_height = (round((side - margin / 25.4) * 96) for side, margin in ((width, 28), (height, 32)))
    browser.ask(
        "Emulation.setDeviceMetricsOverride", width=inner_width, height=inner_height, deviceScaleFactor=1, mobile=False
    )
    browser.ask("Emulation.setEmulatedMedia", media="print", features=[])
    tables = browser.evaluate(
        "[...document.querySelectorAll('table')].map(t => [t.getBoundingClientRect().height, t.scrollWidth, "
        "getComputedStyle(t).breakInside])"
    )
    browser.ask("Emulation.setEmulatedMedia", media="", features=[])
    assert len(tables) >= 4
    for high, wide, breaks in tables:
        assert high <= inner_height
        assert wide <= inner_width
        assert breaks == "avoid"
