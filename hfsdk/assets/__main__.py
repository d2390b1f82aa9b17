"""``python -m hfsdk.assets prepare | list | verify``: models and data that need no hub, in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from hfsdk.assets.cache import differing_files
from hfsdk.assets.catalog import MODELS, model_folder
from hfsdk.assets.reviews import reviews_file, reviews_place
from hfsdk.core.errors import ModelNotFoundError

REVIEWS = "movie-reviews"


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status: 0 when all is there, 1 when something is missing or differs."""
    parser = argparse.ArgumentParser(prog="python -m hfsdk.assets", description=__doc__)
    parser.add_argument("command", choices=("prepare", "list", "verify"))
    parser.add_argument("names", nargs="*", help=f"some of {', '.join([*MODELS, REVIEWS])}; all when none is given")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {*MODELS, REVIEWS}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join([*MODELS, REVIEWS])}")
    names = options.names or [*MODELS, REVIEWS]
    action = {"prepare": _prepare, "list": _list, "verify": _verify}[options.command]
    went_well = [_report(name, action) for name in names]  # a list, so that one failure does not hide the next
    return 0 if all(went_well) else 1


def _report(name: str, action: Callable[[str], str]) -> bool:
    """Print the action's findings; return whether it went well."""
    try:
        print(f"{name:24} {action(name)}", flush=True)
    except ModelNotFoundError as error:
        print(f"{name:24} missing: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _prepare(name: str) -> str:
    return f"ready: {reviews_file() if name == REVIEWS else model_folder(name)}"


def _list(name: str) -> str:
    path = _place(name)
    if not path.is_dir():
        return f"not prepared yet; would lie at {path}"
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return f"{size / 1e6:6.1f} MB  {path}"


def _verify(name: str) -> str:
    path = _place(name)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} is not there. Run `python -m hfsdk.assets prepare {name}`.")
    if differing := differing_files(path):
        raise ModelNotFoundError(
            f"{', '.join(differing)} in {path} differ from the recorded sha256. Delete {path} and run "
            f"`python -m hfsdk.assets prepare {name}` (for tiny, install hfsdk again)."
        )
    return f"as recorded: {path}"


def _place(name: str) -> Path:
    return reviews_place() if name == REVIEWS else MODELS[name].place()


if __name__ == "__main__":
    sys.exit(main())
