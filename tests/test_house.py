"""How the package is built: nothing new is over the limits of length, `hfsdk/` shows few entries, and a file's name occurs once."""

import subprocess
import sys
from pathlib import Path


def test_nothing_new_is_over_a_limit():
    script = Path(__file__).parents[1] / "scripts" / "house.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.partition("over a limit:")[2]
