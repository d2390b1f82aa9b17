"""Pictures of a kernel that is killed in training and of the next one: ``python scripts/screenshot_attach.py FOLDER [--dark]``."""

import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.viz import attach_in_lab as program
from tests.viz import harness

CELLS = [
    program.BEGIN, program.TRACE, program.ATTACH, program.LIST, program.WATCH, program.TRACE, program.HISTORY, program.ROWS,
    program.CLOSE,
]  # fmt: skip
BEFORE, AFTER, END = (0, 1), (2, 3, 4, 5, 6, 7), (8,)


def main(folder: str, *, dark: bool = False) -> None:
    """Train, kill the kernel, let JupyterLab restart it, attach; a picture of each, ``attach_1_before.png`` and so on."""
    ending = "_dark.png" if dark else ".png"
    with tempfile.TemporaryDirectory() as temporary, program.kept_state(Path(temporary) / "state") as state:
        path = harness.write_notebook(Path(temporary) / "attach.ipynb", CELLS)
        with harness.open_alone(path, 1180, 5000, dark, state) as opened:

            def picture(name: str) -> None:
                opened.page.wait_for_timeout(1000)
                opened.page.screenshot(path=Path(folder) / f"attach_{name}{ending}")

            opened.run(*BEFORE)
            program.wait_steps(opened, 5)
            picture("1_before")
            opened.kill_kernel()
            picture("2_killed")
            opened.accept_restart()
            picture("3_gone")
            opened.run(*AFTER)
            opened.wait(60)
            program.wait_steps(opened, 12, -1)
            picture("4_attached")
            opened.page.locator('.hf-dashboard [data-action="pause"]').click()
            opened.page.wait_for_selector('.hf-dashboard .hf-state:text-matches(", paused")')
            picture("5_paused")
            opened.run(*END)
            opened.wait(60)
            picture("6_closed")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends then, too
    words = [word for word in sys.argv[1:] if word != "--dark"]
    main(words[0], dark="--dark" in sys.argv)
