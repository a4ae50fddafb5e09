"""The report: what it says follows from result.json, and a browser shows it whole, quietly and within its width."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pretend
from lemonx import cli
from lemonx.errors import BadOutput, BadRecipe
from lemonx_lab.cli import show_experiments as show
from lemonx_lab.experiments import report, verdict, wording
from lemonx_lab.experiments.answer import head_starts, steps_to
from lemonx_lab.experiments.report import charts, view
from lemonx_lab.experiments.result_file import ArmResult, Result, parse

ARMS: list[dict[str, Any]] = pretend.EXPERIMENT["arms"]
NASTY = '<b id="nasty">bold</b> & </script><script>nasty()</script>'
LONG = "an arm whose label does not want to end before it has named every setting that it was ever trained with"
PHONE = 390


def _twelve() -> dict[str, Any]:
    source = pretend.EXPERIMENT["sources"]["source"]
    more = [
        {"label": "LEMON, indivisible", "source": "indivisible"},
        {"label": "FPI, indivisible", "method": "fpi", "source": "indivisible"},
        {"label": "AKI, indivisible", "method": "aki", "source": "indivisible"},
        {"label": NASTY, "method": "staged"},
        {"label": LONG, "method": "net2net"},
        {"label": "G_stack", "method": "gstack"},
    ]
    return {"arms": ARMS + more, "sources": {"source": source, "indivisible": {**source, "steps": 900}}}


def _tasks(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "metric": "accuracy", "train": {"steps": 10 + len(name)}} for name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Three results: twelve arms; one seed, where higher is better; a single length, passed or missed by all."""
    cache = tmp_path_factory.mktemp("cache")
    rates = [{"label": f"LEMON, {rate}", "train": {"learning_rate": rate}, "lengths": [0.6]} for rate in (1e-3, 1e-4)]
    asked = (
        (
            pretend.experiment(**_twelve()),
            {**pretend.SPEEDS, "gstack": 2.0, "net2net": 0.7, "LEMON, indivisible": 1.62},
        ),
        (
            pretend.experiment(
                name="glue", metric="accuracy", better="higher", seeds=[0], arms=ARMS[:4], downstream=_tasks("a", "bc")
            ),
            pretend.SPEEDS,
        ),
        (pretend.experiment(name="max-lr", arms=ARMS[:1] + rates), {"LEMON, 0.001": 1.9, "LEMON, 0.0001": 1.3}),
    )
    return [pretend.made(one, cache, speeds, quick=one.name == "glue") for one, speeds in asked]


@pytest.fixture(scope="module")
def contents(results: list[Result]) -> list[dict[str, Any]]:
    """The results as they stand in their files."""
    return [one.as_json() for one in results]


@pytest.fixture(scope="module")
def page(results: list[Result], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(results, tmp_path_factory.mktemp("page") / "report.html")


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    within: tuple[str, ...] = ()


@dataclass
class Dom(HTMLParser):
    """Every element of a page, with the text directly in it."""

    elements: list[Element] = field(default_factory=list)
    stack: list[Element] = field(default_factory=list)
    VOID = ("meta", "link", "br", "input", "rect", "line", "circle", "polyline", "path")

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {k: v or "" for k, v in attrs}, within=tuple(e.tag for e in self.stack))
        self.elements.append(element)
        if tag not in self.VOID:
            self.stack.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {k: v or "" for k, v in attrs}, within=tuple(e.tag for e in self.stack)))

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.stack[-1].text += data

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]


def dom(text: str) -> Dom:
    parsed = Dom()
    parsed.feed(text)
    return parsed


def _at(results: list[dict[str, Any]], path: str) -> Any:
    value: Any = results
    for key in path.split("/"):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def _leaves(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for name, child in value.items() for k, v in _leaves(child, f"{path}/{name}").items()}
    return {path: value}


def assert_numbers_are_the_results(text: str, results: list[dict[str, Any]]) -> None:
    """Every number equals its place in result.json and reads as such; none of the answer is missing."""
    shown = {}
    for element in dom(text).all("data"):
        path = element.attributes["data-path"]
        value = _at(results, path)
        assert json.loads(element.attributes["value"]) == value, path
        shown[path] = element.text
        if isinstance(value, float) and re.fullmatch(r"[−\d.,]+", element.text):
            scale = 100 if "/saved/" in path else 1
            digits = len(element.text.partition(".")[2])
            read = float(element.text.replace("−", "-").replace(",", ""))
            assert abs(read - scale * value) <= 0.5 * 10**-digits * (1 + 1e-9), path
    for i, content in enumerate(results):
        wanted = {f"{i}/mark/mean": content["mark"]["mean"], f"{i}/steps": content["steps"]}
        for j, arm in enumerate(content["arms"]):
            baseline = arm["label"] == content["experiment"]["baseline"]
            for name in ("saved", "downstream") if baseline else ("saved", "downstream", "reach"):
                wanted.update(_leaves(arm[name], f"{i}/arms/{j}/{name}"))
            for k, at in enumerate(arm["at"]):
                wanted.update(_leaves(at, f"{i}/arms/{j}/at/{k}"))
        means = {path for path, value in wanted.items() if path.endswith(("mean", "spread")) and value is not None}
        assert means and not means - shown.keys()


def test_numbers_on_the_page_are_those_of_the_results(page: Path, contents: list[dict[str, Any]]) -> None:
    assert_numbers_are_the_results(page.read_text(), contents)


def test_a_wrong_number_would_be_noticed(page: Path, contents: list[dict[str, Any]]) -> None:
    other = json.loads(json.dumps(contents))
    other[0]["arms"][1]["saved"]["steps"]["mean"] += 1e-3
    with pytest.raises(AssertionError, match="0/arms/1/saved/steps/mean"):
        assert_numbers_are_the_results(page.read_text(), other)


def test_the_page_needs_nothing_from_elsewhere(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(?i)https?://|@import|url\((?!#)", text.replace("http://www.w3.org/2000/svg", ""))
    for element in dom(text).elements:
        assert "src" not in element.attributes and not any(name.startswith("on") for name in element.attributes)
        assert element.attributes.get("href", "#").startswith(("#", "data:"))


def test_labels_are_text(page: Path) -> None:
    """A label with HTML in it is read, not obeyed: the page has one script, its own."""
    parsed = dom(page.read_text())
    assert len(parsed.all("script")) == 1
    assert not any(element.attributes.get("id") == "nasty" for element in parsed.elements)
    assert any(element.tag == "th" and NASTY in element.text for element in parsed.elements)


def test_tables_and_charts_can_be_read_aloud(page: Path) -> None:
    parsed = dom(page.read_text())
    ids = [element.attributes["id"] for element in parsed.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    for element in parsed.elements:
        for name in element.attributes.get("aria-labelledby", "").split():
            assert name in ids
    assert all(element.attributes.get("scope") for element in parsed.all("th"))
    assert all("aria-labelledby" in element.attributes for element in parsed.all("table"))
    drawings = [e for e in parsed.all("svg") if e.attributes.get("aria-hidden") != "true"]
    assert drawings and len([e for e in parsed.all("title") if e.within[-1] == "svg"]) == len(drawings)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: str, second: str) -> float:
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_are_legible_in_light_and_dark(page: Path) -> None:
    """WCAG AA for text, 4.5 to 1, of every colour that words or lines have, on every ground they stand on."""
    themes = re.findall(r":root \{(.*?)\}", page.read_text(), re.S)
    assert len(themes) == 2  # paper is light
    for theme in themes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        words = ["ink", "quiet", "good", "bad", "unsure", *(f"c{i}" for i in range(9))]
        for word in words:
            grounds = ("paper", "card", "tint") if word in ("ink", "quiet") else ("paper",)
            for ground in grounds:
                assert _contrast(colours[word], colours[ground]) >= 4.5, (word, ground)


def test_arms_differ_in_colour_or_dash(results: list[Result]) -> None:
    for content in results:
        looks = view.styles(content, view.other_methods(results))
        assert len({(look.colour, look.dash) for look in looks.values()}) == len(content.arms)
        assert any(look.strong for look in looks.values())


def _content(lemon: list[list[float]], other: list[list[float]], *, better: str = "lower") -> Result:
    """Scratch reaches 1.0 in 1000 steps; finals of the others by seed, at 400 and 800 steps."""

    def arm(label: str, method: str, finals: list[list[float]]) -> ArmResult:
        runs = [
            pretend.ended(seed, steps, final)
            for seed, both in enumerate(finals)
            for steps, final in zip((400, 800), both, strict=True)
        ]
        return pretend.arm(label, method, runs)

    scratch = arm("scratch", "scratch", [[2, 2]] * len(lemon))
    return pretend.compared([scratch, arm("LEMON", "lemon", lemon), arm("AKI", "aki", other)], better=better)


CLEAR, SLOWER, NEVER, EARLY = (
    [[1.2, 0.8], [1.21, 0.8]],
    [[1.6, 0.9], [1.61, 0.9]],
    [[2, 1.5], [2, 1.4]],
    [[0.9, 0.5]] * 2,
)


@pytest.mark.parametrize(
    ("lemon", "other", "outcome", "basis"),
    [
        (CLEAR, SLOWER, verdict.AHEAD, verdict.STEPS),
        (SLOWER, CLEAR, verdict.BEHIND, verdict.STEPS),
        (CLEAR, [[1.205, 0.8], [1.205, 0.8]], verdict.NOISE, verdict.STEPS),
        # What the seeds have in common is not noise.
        ([[1.2, 0.8], [1.6, 0.9]], [[1.22, 0.8], [1.63, 0.9]], verdict.AHEAD, verdict.STEPS),
        (CLEAR, NEVER, verdict.AHEAD, verdict.STEPS),
        (NEVER, CLEAR, verdict.BEHIND, verdict.STEPS),
        (EARLY, CLEAR, verdict.AHEAD, verdict.STEPS),
        (CLEAR, EARLY, verdict.BEHIND, verdict.STEPS),
        # Two bounds decide nothing: the final loss at 800 steps does.
        (EARLY, [[0.8, 0.6]] * 2, verdict.AHEAD, verdict.FINAL),
        (NEVER, [[2, 1.2], [2, 1.2]], verdict.BEHIND, verdict.FINAL),
        (NEVER, [[2, 1.42], [2, 1.47]], verdict.NOISE, verdict.FINAL),
        (CLEAR[:1], SLOWER[:1], verdict.OPEN, verdict.STEPS),
    ],
)
def test_the_verdict_follows_from_the_numbers(
    lemon: list[list[float]], other: list[list[float]], outcome: str, basis: str
) -> None:
    content = _content(lemon, other)
    arms = content.arms
    found = verdict.judge(content, arms[1], arms[2])
    assert (found.outcome, found.basis) == (outcome, basis)
    turned = _content([[-a for a in one] for one in lemon], [[-a for a in one] for one in other], better="higher")
    assert verdict.judge(turned, turned.arms[1], turned.arms[2]).outcome == outcome


def test_arms_are_compared_seed_by_seed() -> None:
    content = _content(CLEAR, SLOWER)
    found = verdict.judge(content, content.arms[1], content.arms[2])
    needs = [
        [steps_to(1.0, list(zip((400, 800), seed, strict=True)), "lower")[0] for seed in a] for a in (CLEAR, SLOWER)
    ]
    lead = [slower - clear for clear, slower in zip(*needs, strict=True) if slower and clear]
    assert found.advantage == pytest.approx(sum(lead) / 2)
    assert found.noise == pytest.approx(abs(lead[0] - lead[1]) / 2**0.5)


def test_variants_are_compared_with_the_reference(making: Callable[[str], ModuleType]) -> None:
    content = _content(CLEAR, SLOWER)
    content.arms.append(content.arms[1].model_copy(update={"label": "other choice"}))
    assert [(c.arm, c.other) for c in verdict.variants(content)] == [("other choice", "LEMON")]
    content.experiment.reference = "other choice"
    assert [(c.arm, c.other) for c in verdict.variants(content)] == [("LEMON", "other choice")]
    # Also where the reference is what sets the mark; finals are compared at every length, with other methods too.
    content.experiment.reference = content.experiment.baseline = "LEMON"
    found = [(c.arm, c.other, c.length, round(c.advantage, 3)) for c in making("experiments").finals(content)]
    assert found[:2] == [("other choice", "LEMON", 400, 0.0), ("other choice", "LEMON", 800, 0.0)]
    assert found[2:4] == [("LEMON", "AKI", 400, 0.4), ("LEMON", "AKI", 800, 0.1)] and len(found) == 6


def test_what_does_not_reproduce_is_said_first(results: list[Result], page: Path) -> None:
    """G_stack is faster than LEMON here, FPI is not, and nothing is known of a single seed."""
    first, single, rates = results
    outcome, sentence = verdict.headline(verdict.claims(first))
    assert outcome == verdict.BEHIND
    assert sentence.startswith("The claim does not reproduce here against G_stack (LEMON).")
    by = {(c.arm, c.other): c.outcome for c in verdict.claims(first)}
    assert by["LEMON", "FPI"] == verdict.AHEAD and ("LEMON", "FPI, indivisible") not in by
    assert {c.outcome for c in verdict.claims(single)} == {verdict.OPEN}
    assert verdict.headline(verdict.claims(single))[1].endswith("on it LEMON is ahead of 3 of 3.")
    assert {(task, c.outcome) for task, c in verdict.tuned(single)} == {("a", verdict.OPEN), ("bc", verdict.OPEN)}
    bounds = {c.arm: (c.outcome, c.bound) for c in verdict.claims(rates)}
    assert bounds == {"LEMON, 0.001": (verdict.AHEAD, "at least"), "LEMON, 0.0001": (verdict.OPEN, "at most")}
    [variant] = verdict.variants(rates)
    assert (variant.basis, variant.length, variant.outcome) == (verdict.FINAL, 600, verdict.BEHIND)
    banner = page.read_text().index('<div class="verdict behind">')
    assert banner < page.read_text().index('class="full answer"') and html.escape(sentence) in page.read_text()


def test_wording(results: list[Result]) -> None:
    texts = {arm.label: wording.reach_text(results[0], arm) for arm in results[0].arms}
    assert texts["scratch"] == "1,000 (sets the mark)"
    assert re.fullmatch(r"\d+ ± \d+", texts["LEMON"]) and re.fullmatch(r"not reached \(0\.\d{4} short\)", texts["FPI"])
    passed = next(arm for arm in results[2].arms if arm.label == "LEMON, 0.001")
    assert wording.reach_text(results[2], passed) == "at most 600 ± 0"
    assert wording.saved_text(passed, "steps") == "at least 40.0 ± 0.0 %"
    alone = next(arm for arm in results[1].arms if arm.label == "LEMON")
    assert "±" not in wording.reach_text(results[1], alone)


def test_a_run_that_diverged_is_left_out_of_its_chart() -> None:
    nan = float("nan")
    assert charts.finite([(1, 2.0), (2, nan), (3, None), (4, float("inf"))]) == ((1, 2.0),)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not a result"),
        ("[]", "is not a result"),
        ('{"arms": []}', "experiment: Field required"),
    ],
)
def test_a_file_of_another_kind_is_refused(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(BadRecipe, match=says) as caught:
        report.read(tmp_path)
    assert "\n" not in str(caught.value) and "lemonx compare" in str(caught.value)


def test_a_result_of_another_shape_is_refused_by_the_name_of_its_part(
    contents: list[dict[str, Any]], tmp_path: Path
) -> None:
    broken = json.loads(json.dumps(contents[0]))
    del broken["arms"][2]["runs"][1]["final"]
    (tmp_path / "result.json").write_text(json.dumps(broken))
    with pytest.raises(BadRecipe, match=re.escape("arms.2.runs.1.final: Field required")):
        report.read(tmp_path)
    with pytest.raises(BadRecipe, match="No such file"):
        report.read(tmp_path / "nothing.json")


def test_report_reads_what_compare_wrote_and_writes_the_whole_page_or_nothing(
    results: list[Result], page: Path, tmp_path: Path
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(results[0].as_json()))
    assert report.read(tmp_path) == results[0] == report.read(tmp_path / "result.json")
    written = report.write([report.read(tmp_path)], tmp_path / "new" / "page.html")
    assert written.read_text() == report.render([results[0]]) and len(list(written.parent.iterdir())) == 1
    assert page.read_bytes().isascii()
    bare = results[0].as_json()
    assert bare["experiment"]["paper"].pop("recipes")  # they may be left out
    assert "the paper&#8217;s recipes" not in report.render([parse(bare, tmp_path)])
    with pytest.raises(BadOutput, match="cannot be written"):
        report.write(results, tmp_path / "result.json" / "page.html")


def test_the_commands_print_what_the_page_says(
    results: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    for number, content in enumerate(results):
        Path(f"{number}").mkdir()
        Path(f"{number}/result.json").write_text(json.dumps(content.as_json()))
    monkeypatch.setattr("sys.argv", ["lemonx", "report", "0", "1/result.json", "-o", "page.html"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code and "wrote page.html" in capsys.readouterr().out
    assert Path("page.html").read_text() == report.render(results[:2])
    show.print_result(results[0], Path("page.html"))
    printed = capsys.readouterr().out
    for arm in results[0].arms:
        assert arm.label in printed and wording.reach_text(results[0], arm) in printed


# In a browser.

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: `apt-get install chromium`")
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"),
    *("--virtual-time-budget=2000", "--dump-dom"),
]


def _browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The DOM after the scripts ran, and what they said on the console."""
    command = [str(BROWSER), *QUIET, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "LANG": "C.UTF-8"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@in_browser
def test_a_browser_shows_the_numbers_and_complains_of_nothing(
    page: Path, contents: list[dict[str, Any]], tmp_path: Path
) -> None:
    shown, console = _browse(page, tmp_path / "profile")
    assert console == []
    assert_numbers_are_the_results(shown, contents)
    # The script ran: it adds a tip, and a cursor to each chart (five a result).
    assert shown.count('class="tip"') == 1 and shown.count('class="cursor"') == 5 * len(contents)


HARNESS = """<!DOCTYPE html><meta charset="utf-8"><body>
<iframe style="border:0;width:{width}px;height:800px" srcdoc="{page}"></iframe><output></output>
<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {{
  const inner = frame.contentDocument, root = inner.documentElement;
  const found = {{ closed: root.scrollWidth }};
  inner.querySelectorAll("details").forEach((one) => (one.open = true));
  found.open = root.scrollWidth;
  const wide = [...inner.querySelectorAll(".scroll")].filter((s) => s.scrollWidth > s.clientWidth);
  found.scrolling = wide.map((s) => s.getAttribute("aria-labelledby"));
  const chart = inner.querySelector("#r0 .charts svg.chart"), box = chart.getBoundingClientRect();
  const line = chart.querySelector('[data-arm="LEMON"]'), point = JSON.parse(line.dataset.points).at(-1);
  const scale = box.width / chart.viewBox.baseVal.width;
  const at = {{ clientX: box.left + point[0] * scale, clientY: box.top + point[1] * scale, bubbles: true }};
  const fired = (name) => chart.dispatchEvent(new frame.contentWindow.PointerEvent(name, at));
  const tip = inner.querySelector(".tip"), dimmed = () => inner.querySelectorAll("#r0 .charts g.dim").length;
  fired("pointermove");
  found.tip = tip.textContent;
  found.hidden = tip.hidden;
  found.dimmed = dimmed();
  fired("pointerleave");
  found.after = [tip.hidden, dimmed()];
  found.tallest = Math.min(...[...inner.querySelectorAll("svg.chart")].map((s) => s.getBoundingClientRect().height));
  document.querySelector("output").textContent = JSON.stringify(found);
  console.log("harness done");
}});
</script>"""


@in_browser
def test_on_a_phone_the_page_keeps_its_width_and_answers_a_finger(
    page: Path, results: list[Result], tmp_path: Path
) -> None:
    harness = tmp_path / "harness.html"
    harness.write_text(HARNESS.format(width=PHONE, page=html.escape(page.read_text())))
    shown, console = _browse(harness, tmp_path / "profile")
    assert len(console) == 1 and "harness done" in console[0], console
    found = json.loads(html.unescape(re.search(r"<output>(.*?)</output>", shown, re.S)[1]))  # pyright: ignore
    assert found["closed"] <= PHONE and found["open"] <= PHONE
    # Nothing is wider than a phone: tables are cards there.
    assert found["scrolling"] == [] and found["tallest"] > 150
    curve = next(c for c in results[0].curves if c.arm == "LEMON" and c.steps == 800)
    loss = wording.metric(curve.validation_loss[-1])
    assert found["tip"] == f"LEMONvalidation loss {loss} at 800 steps" and found["hidden"] is False
    assert found["dimmed"] == 4 * (len(results[0].arms) - 1) and found["after"] == [True, 0]


DOCS = Path(__file__).resolve().parents[2] / "docs"


@in_browser
def test_the_report_fits_a_desk_and_a_few_sheets_of_paper(tmp_path: Path) -> None:
    """At 1400 px no column is cut; printed as it opens, the page has fewer than 15 sheets."""
    harness, paths = tmp_path / "harness.html", sorted((DOCS / "results").glob("*/result.json"))
    paths.sort(key=lambda path: path.parent.name != "vit")  # the chart that is looked at has an arm LEMON
    page = report.write([report.read(path) for path in paths], tmp_path / "report.html")
    harness.write_text(HARNESS.format(width=1400, page=html.escape(page.read_text())))
    shown, _ = _browse(harness, tmp_path / "profile")
    found = json.loads(html.unescape(re.search(r"<output>(.*?)</output>", shown, re.S)[1]))  # pyright: ignore
    assert max(found["closed"], found["open"]) <= 1400 and found["scrolling"] == []
    printed = tmp_path / "report.pdf"
    options = [option for option in QUIET if option != "--dump-dom"]
    command = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'other'}", f"--print-to-pdf={printed}"]
    subprocess.run([*command, page.as_uri()], capture_output=True, timeout=900, check=True)
    sheets = len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes()))
    assert 3 < sheets < 3 + len(paths) / 2, sheets  # two experiments on a sheet, and the summary


def test_the_summary_shows_the_arm_that_the_claim_is_judged_by() -> None:
    for name, label in (("vit-best-rate", "LEMON, WSD"), ("start-vit", "own copies")):  # there, LEMON sets the mark
        [section] = view.sections([report.read(DOCS / "results" / name)])
        assert section.lead is not None and section.lead.label == label


def test_the_readme_says_what_the_report_says(making: Callable[[str], ModuleType]) -> None:
    """The savings of the default start to the percent, and every outcome other than "reproduces" in its word."""
    readme = (DOCS.parent / "README.md").read_text()
    [section] = [part for part in readme.split("\n## ") if part.startswith("Train the larger model")]
    words = {verdict.BEHIND: "does not reproduce", verdict.OPEN: "undecided", verdict.NOISE: "level"}
    flat = " ".join(section.split())
    for name in ("vit", "vit-best-rate", "bert", "lm"):
        for outcome in {c.outcome for c in verdict.claims(report.read(DOCS / "results" / name))} - {verdict.AHEAD}:
            assert words[outcome] in flat, (name, outcome)
    rows = {line.split("|")[1].split()[0]: line for line in section.splitlines() if line.startswith("| ")}
    for model, name, label in (
        ("ViT", "vit-best-rate", "own copies, no warm-up, WSD"),
        ("Llama;", "start", "own copies, no warm-up"),
        ("BERT", "bert", "own copies, no warm-up, WSD"),
    ):
        content = report.read(DOCS / "results" / name)
        arm = next(arm for arm in content.arms if arm.label == label)
        assert len(content.experiment.seeds) == 5
        if arm.saved:
            for what in ("steps", "flops_with_source"):
                assert f"| {_said(arm, what)} |" in rows[model], (name, what)
        else:
            assert f"undecided: {arm.reach.reached} of {arm.reach.seeds} seeds" in rows[model]
            assert arm.at[-1].steps == round(0.7 * content.steps) and "70 % of the steps" in rows[model]
    again = next(a for a in report.read(DOCS / "results" / "lm").arms if a.label == "own copies, no warm-up")
    assert f"{_said(again, 'steps')[:-2]} and {_percent(again.saved.flops_with_source)}" in rows["Llama;"]
    inside = {(one.arm, one.steps): one for one in head_starts(report.read(DOCS / "results" / "growth-inside-large"))}
    for source, steps in (("2x64, 2400 steps", 150), ("2x64, 4800 steps", 300)):
        assert _percent(inside[source, steps].net) in flat and not inside[source, steps].bound
        assert inside[f"not grown, {source.partition(', ')[2]}", 150].net.mean > inside[source, steps].net.mean
    long = report.read(DOCS / "results" / "growth-inside-long-ramp")
    found = {(one.arm, one.steps): one for one in head_starts(long)}
    ramp, plain = found["2x64, 1200 steps, ramp", 2000], found["2x64, 1200 steps", 2000]
    assert f"15 tokens per parameter {_percent(ramp.net)} with a ramp of the new layers, {_percent(plain.net)}" in flat
    assert not ramp.bound and not plain.bound
    for name in ("baselines", "baselines-large"):
        found = making("experiments").finals(report.read(DOCS / "results" / name))
        starts = {(c.arm, c.other): c.outcome for c in found}
        assert starts["own copies, no warm-up, WSD", "warm start"] == verdict.AHEAD


def _said(arm: Any, what: str) -> str:
    return wording.saved_bound(arm) + _percent(getattr(arm.saved, what))


def _percent(share: Any) -> str:
    return f"{100 * share.mean:.0f} ± {100 * share.spread:.0f} %"
