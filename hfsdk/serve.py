"""``python -m hfsdk.serve``: kept sessions for kernels outside the cluster, and for a look with a browser.

It runs on the head node of the cluster, and listens on 127.0.0.1 (for an SSH tunnel) unless ``--host`` says otherwise. A kernel and
the server prove to each other that they know its token, which is in a file of mode 0600 and is never sent. A browser comes by a
link that is good once: one is said at the start, and ``--link`` asks a running server for another.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from hfsdk.core.errors import HfsdkError


def main(arguments: list[str] | None = None) -> int:
    """Serve until it is interrupted; return the exit status."""
    from hfsdk.kept.wire import PORT

    parser = argparse.ArgumentParser(prog="python -m hfsdk.serve", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--address", help='of the Ray cluster, "auto" or host:port; by default the sessions of this machine alone')
    parser.add_argument("--certificate", help="a PEM file, of a certificate that browsers know; by default one is made")
    parser.add_argument("--key", help="its key, a PEM file")
    parser.add_argument("--token-file", type=Path, help="by default one in ~/.local/state/hfsdk, made where there is none")
    parser.add_argument(
        "--link", nargs="?", const="", metavar="hfsdk://HOST:PORT/NAME",
        help="ask the server that runs there (by default at --host and --port) for a link for a browser, good once, and end",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        return _serve(given) if given.link is None else _link(given)
    except (HfsdkError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _link(given: argparse.Namespace) -> int:
    from hfsdk.kept.attach import TOKEN, package_version
    from hfsdk.kept.remote_session import page_link

    if given.token_file is not None or not (token := os.environ.get(TOKEN, "")):
        from hfsdk.kept.server import token_file

        token = _token_in(given.token_file or token_file())
    host = f"[{given.host}]" if ":" in given.host else given.host
    sys.stdout.write(f"{page_link(given.link or f'hfsdk://{host}:{given.port}/', token, package_version())}\n")
    return 0


def _serve(given: argparse.Namespace) -> int:
    from hfsdk.engine.ray.head import await_end, ends_held
    from hfsdk.kept.server import ServeOptions, Server, token_file

    file = given.token_file or token_file()
    token = _token_in(file)
    options = ServeOptions(given.host, given.port, token, given.address, given.certificate, given.key)
    with ends_held():
        server = Server(options, _tell)
        scheme, web = ("hfsdks", "https") if given.certificate else ("hfsdk", "http")
        host = f"[{given.host}]" if ":" in given.host else given.host
        pages = f", and for a browser at {web}://{host}:{server.port}{server.page_link()} (once; --link makes another)"
        told = pages if options.shows_pages else ""
        sys.stdout.write(f"serving kept sessions at {scheme}://{host}:{server.port}/NAME{told}; the token is in {file}\n")
        sys.stdout.flush()
        serving = threading.Thread(target=server.run, name="hfsdk-serve", daemon=True)
        serving.start()
        await_end()
        server.close()
        serving.join(5)
    return 0


def _token_in(file: Path) -> str:
    """Return the token that a file has.

    Raises:
        OptionError: there is none.
    """
    from hfsdk.kept.tls import check_there

    check_there(
        "--token-file", file, "leave --token-file out: the token then lies in ~/.local/state/hfsdk, made where there is none"
    )
    return file.read_text(encoding="utf-8").strip()


def _tell(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal is closed: the server goes on
        sys.stderr.write(f"{time.strftime('%d %b %H:%M:%S')} {text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
