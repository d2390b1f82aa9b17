"""The pages that only the site shows whole are complete: the API reference, the decision records, the side bar.

``python tests/test_site.py`` writes the list of decisions anew.
"""

import re
import subprocess
from pathlib import Path

import pytest

import hfsdk as hf
from tests.viz import harness

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions" / "README.md"
SPHINX = ROOT / ".venv-docs" / "bin" / "python"


def test_the_reference_has_every_public_name_once():
    names = re.findall(r"^- `hf\.(\w+)`$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(names) == sorted(hf.__all__)


def decisions():
    """The rows of their list: date and title, as each file's heading has them."""
    rows = []
    for path in sorted((DECISIONS.parent).glob("20*.md")):
        title, date = re.fullmatch(r"# (.+) \((\d{4}-\d\d-\d\d)\)", path.read_text().partition("\n")[0]).groups()
        rows.append(f"| {date} | [{title}]({path.name}) |\n")
    return "".join(rows)


def test_every_decision_is_in_their_list():
    assert DECISIONS.read_text().endswith("|---|---|\n" + decisions())


def test_every_page_is_in_the_side_bar():
    contents = re.search(r"^CONTENTS = \{.*?^\}", (ROOT / "docs" / "conf.py").read_text(), re.M | re.S)[0]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {page for page in pages if f'"docs/{page}"' not in contents} == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not SPHINX.exists():
        pytest.skip("make docs has not been run here")
    folder = tmp_path_factory.mktemp("site")
    command = [SPHINX, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-b", "html", "-c", "docs", ".", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_site_builds_without_a_warning_and_opens_at_the_readme(site):
    assert "url=README.html" in (site / "index.html").read_text()
    first = re.findall(r'<img[^>]*class="(only-\w+)[^>]*src="_images/(\w+)', (site / "README.html").read_text())
    assert first == [("only-light", "timeline_light"), ("only-dark", "timeline_dark")], "its picture is that of the site's theme"
    assert 'id="hfsdk.PPO"' in (site / "docs" / "api.html").read_text()


@pytest.mark.browser
@pytest.mark.skipif(harness.CHROMIUM is None, reason="no chromium on the PATH")
def test_saved_pictures_are_alive_on_the_site_and_follow_its_theme(site):
    pytest.importorskip("playwright", reason="playwright is not installed")
    console, outside, colours = [], [], []
    with harness.browser() as chromium:
        for theme in ("light", "dark"):
            page = chromium.new_page()
            harness.watch(page, console, outside)
            page.add_init_script(f"localStorage.setItem('theme', '{theme}')")
            page.goto(f"file://{site / 'notebooks' / '01_ppo_step_by_step.html'}")
            page.wait_for_function("() => document.querySelectorAll('.hf-picture:not([data-ready])').length === 0")
            timeline = page.locator(".hf-picture[data-picture=timeline]").first
            whole = timeline.inner_html()
            timeline.locator("button", has_text="+").first.click()
            timeline_now = "document.querySelector('.hf-picture[data-picture=timeline]').innerHTML"
            page.wait_for_function(f"before => {timeline_now} !== before", arg=whole, timeout=60_000)  # it zooms in
            colours.append(page.evaluate("() => getComputedStyle(document.querySelector('.hf-picture .hf')).backgroundColor"))
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
            page.close()
    assert colours[0] != colours[1]
    assert console == []
    assert outside == []


if __name__ == "__main__":
    head, _, _ = DECISIONS.read_text().partition("|---|---|\n")
    DECISIONS.write_text(f"{head}|---|---|\n{decisions()}")
