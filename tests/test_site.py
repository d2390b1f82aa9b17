"""The pages that only the site shows whole are complete: the API reference, the decision records, the side bar."""

import re
import subprocess
from pathlib import Path

import pytest

import hfsdk as hf

ROOT = Path(__file__).parents[1]
SPHINX = ROOT / ".venv-docs" / "bin" / "python"


def test_the_reference_has_every_public_name_once():
    names = re.findall(r"^- `hf\.(\w+)`$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(names) == sorted(hf.__all__)


def test_every_decision_is_in_their_list():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((20[\w.-]+)\)", (folder / "README.md").read_text())
    assert listed == sorted(path.name for path in folder.glob("20*.md"))


def test_every_page_is_in_the_side_bar():
    contents = re.search(r"^CONTENTS = \{.*?^\}", (ROOT / "docs" / "conf.py").read_text(), re.M | re.S)[0]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {page for page in pages if f'"docs/{page}"' not in contents} == set()


@pytest.mark.slow
@pytest.mark.skipif(not SPHINX.exists(), reason="make docs has not been run here")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [SPHINX, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-b", "html", "-c", "docs", ".", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not re.search(r'(src|href)="(https?:)?//[^"]+\.(js|css)', (tmp_path / "README.html").read_text()), "it asks a network"
