"""Runs the first program of the README as it stands, and so prints what is shown there: ``python scripts/readme_transcript.py``."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def main() -> None:
    """Run the first block of Python, as if it were pasted."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)[:1]
    exec(compile(code, "README", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
