"""Where a call was started is told in IPython 7 too, which Colab has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CELLS = """
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell
{old}
shell = InteractiveShell.instance()
for cell in (
    "from hfsdk.session.client import user_line\\ndef f():\\n    return user_line()",
    "print(user_line(), f())",
    "x = 1\\nprint(user_line(), f())",
    "print(user_line(), f())",
):
    shell.run_cell(cell, store_history=True)
"""


@pytest.mark.parametrize("old", ["", "del CachingCompiler.format_code_name"], ids=["now", "as in IPython 7"])
def test_a_call_is_at_its_cell_and_line(old: str, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + CELLS.format(old=old)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("cell")]
    assert lines == ["cell 2, line 1 cell 1, line 3", "cell 3, line 2 cell 1, line 3", "cell 4, line 1 cell 1, line 3"], done.stderr
