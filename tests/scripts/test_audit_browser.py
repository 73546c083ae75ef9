"""An audit's page in headless Chromium: what it looks like there, in light and dark, on a laptop and on a phone.

The page itself runs nothing. It is put into a frame of the asked width, and a script around it measures.
"""

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from keptset.scripts.audit_page import render_audit
from keptset.trainer_bridge.audit.report import AuditReport

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path (Debian: apt-get install chromium)"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="headless Chromium is started as on Linux"),
]
ALONE = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--window-size=1400,900"),
)
LAPTOP, PHONE = (1280, 800), (390, 844)

MEASURE = """
const told = {errors: []};
window.addEventListener('error', event => told.errors.push(String(event.message)));
window.addEventListener('load', () => {
  const frame = document.querySelector('iframe'), page = frame.contentDocument, view = frame.contentWindow;
  const style = (element, name) => view.getComputedStyle(element)[name];
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const all = selector => [...page.querySelectorAll(selector)];
  told.dark = view.matchMedia('(prefers-color-scheme: dark)').matches;
  told.background = style(page.body, 'backgroundColor');
  told.overflow = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  told.wide = all('main *').filter(e => !e.closest('.scroll, .skip, .card') && box(e)[2] > view.innerWidth + 1).length;
  told.empty = all('figure svg').filter(e => box(e)[3] - box(e)[1] < 100).length;
  told.figures = all('figure svg').length;
  told.text = page.querySelector('main').innerText;
  told.scripted = page.defaultView.hacked === true;
  told.tiny = all('main *').filter(e => parseFloat(style(e, 'fontSize')) < 10).length;
  const read = [...all('p, h1, h2, h3, td, th, dd, dt, li, .t, .verdict, figcaption, a, summary, code, small')];
  told.colours = [...new Set(read.map(e => {
    let under = e;
    while (under && style(under, 'backgroundColor') === 'rgba(0, 0, 0, 0)') under = under.parentElement;
    return style(e, 'color') + ' on ' + style(under ?? page.body, 'backgroundColor');
  }))];
  const token = page.querySelector('.tokens .t:not(.forced)');
  if (token) {
    const card = token.querySelector('.card');
    told.hidden = style(card, 'display');
    token.focus();
    told.shown = style(card, 'display');
    told.card = box(card);
    told.cardText = card.innerText;
    told.view = [view.innerWidth, view.innerHeight];
    told.marks = all('.tokens .t').map(e => style(e, 'backgroundColor'));
  }
  const told_here = document.createElement('pre');
  told_here.id = 'told';
  told_here.textContent = JSON.stringify(told);
  document.body.append(told_here);
});
"""


@dataclass(frozen=True)
class Seen:
    """What was measured, and what Chromium said."""

    told: dict[str, Any]
    log: str


Look = Callable[..., Seen]


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory) -> Look:
    """`look(page, size, dark=...)`: the page in a fresh Chromium."""

    def look_at(page: str, size: tuple[int, int], *, dark: bool = False) -> Seen:
        folder = tmp_path_factory.mktemp("browser")
        frame = f'<iframe width="{size[0]}" height="{size[1]}" style="border:0" srcdoc="{html.escape(page)}"></iframe>'
        around = f"<!doctype html><meta charset=utf-8><script>{MEASURE}</script><body>{frame}"
        (folder / "page.html").write_text(around, encoding="utf-8")
        assert CHROMIUM is not None
        command = [CHROMIUM, *ALONE, *(["--force-dark-mode"] if dark else []), f"--user-data-dir={folder / 'profile'}"]
        done = subprocess.run(
            [*command, "--dump-dom", (folder / "page.html").as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
        assert found is not None, done.stderr[-2000:]
        return Seen(told=json.loads(html.unescape(found[1])), log=done.stderr)

    return look_at


@pytest.fixture(scope="module")
def laptop(look: Look, audit_report: AuditReport) -> Seen:
    return look(render_audit(audit_report), LAPTOP)


@pytest.fixture(scope="module")
def dark_phone(look: Look, audit_report: AuditReport) -> Seen:
    return look(render_audit(audit_report), PHONE, dark=True)


def contrast(pair: str) -> float:
    """WCAG 2 contrast of `colour on colour`."""

    def luminance(colour: str) -> float:
        channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    above, below = sorted(map(luminance, pair.split(" on ")))
    return (below + 0.05) / (above + 0.05)


@pytest.mark.parametrize("where", ["laptop", "dark_phone"])
def test_nothing_overflows_fails_or_is_too_small(where: str, request: pytest.FixtureRequest) -> None:
    seen: Seen = request.getfixturevalue(where)
    assert seen.told["errors"] == [] and "CONSOLE" not in seen.log
    assert (seen.told["overflow"], seen.told["wide"]) == (0, 0)
    assert (seen.told["figures"], seen.told["empty"], seen.told["tiny"]) == (10, 0, 0)


def test_the_verdict_is_the_first_thing_said(laptop: Seen, audit_report: AuditReport) -> None:
    lines = [line for line in laptop.told["text"].split("\n") if line.strip()]
    assert lines[2] == audit_report.verdict
    for part in ("Not tested", "Findings", "Tests", "Ratios", "Signed budget", "Policy versions", "Worst responses"):
        assert part in lines


def test_dark_is_another_page_for_the_eye(laptop: Seen, dark_phone: Seen) -> None:
    assert (laptop.told["dark"], dark_phone.told["dark"]) == (False, True)
    assert laptop.told["background"] == "rgb(255, 255, 255)" != dark_phone.told["background"]
    assert set(laptop.told["marks"]).isdisjoint(set(dark_phone.told["marks"]) - {"rgba(0, 0, 0, 0)"})


@pytest.mark.parametrize("where", ["laptop", "dark_phone"])
def test_all_text_has_the_contrast_that_reading_asks_for(where: str, request: pytest.FixtureRequest) -> None:
    colours = request.getfixturevalue(where).told["colours"]
    assert len(colours) > 8
    assert {pair: contrast(pair) for pair in colours if contrast(pair) < 4.5} == {}


@pytest.mark.parametrize("where", ["laptop", "dark_phone"])
def test_a_focused_token_shows_its_numbers_and_kept_set_inside_the_window(
    where: str, request: pytest.FixtureRequest, audit_report: AuditReport
) -> None:
    told = request.getfixturevalue(where).told
    assert (told["hidden"], told["shown"]) == ("none", "block")
    left, top, right, bottom = told["card"]
    assert left >= 0 and top >= 0 and right <= told["view"][0] and bottom <= told["view"][1]
    token = next(token for token in audit_report.worst[0].tokens if token.sampled)
    assert "log ratio" in told["cardText"] and "kept mass" in told["cardText"]
    assert (token.kept[0][1] or "").strip() in told["cardText"]


def test_hostile_ids_and_texts_neither_run_nor_widen_the_page(look: Look, audit_report: AuditReport) -> None:
    evil = "<script>window.hacked=true</script><img src=x onerror='window.hacked=true'>" + "W" * 300
    shown = replace(audit_report.worst[0], rollout_id=evil, prompt_text=evil, reason=evil)
    shown = replace(shown, tokens=(replace(shown.tokens[0], text=evil, kept=((1, evil, -0.1),)), *shown.tokens[1:]))
    finding = audit_report.findings[0]
    example = replace(finding.examples[0], rollout_id=evil, detail=evil)
    finding = replace(finding, examples=(example,), summary=evil, advice=evil)
    report = replace(audit_report, worst=(shown,), findings=(finding,), verdict=evil)
    report = replace(report, not_tested=(replace(report.not_tested[0], check=evil, reason=evil),))
    report = replace(report, settings=(replace(report.settings[0], name=evil),), identities=({evil: evil},))
    seen = look(render_audit(report), PHONE)
    assert seen.told["scripted"] is False and "hacked" in seen.told["text"]
    assert (seen.told["overflow"], seen.told["wide"]) == (0, 0)
