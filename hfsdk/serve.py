"""``python -m hfsdk.serve``: kept sessions for kernels outside the cluster, and for a look with a browser.

It runs on the head node of the cluster, listens on 127.0.0.1 (for an SSH tunnel) unless it has a certificate, and asks everybody
for its token, which is in a file of mode 0600.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from hfsdk.core.errors import HfsdkError


def main(arguments: list[str] | None = None) -> int:
    """Serve until it is interrupted; return the exit status."""
    from hfsdk.engine.ray.ray_head import await_end, hold_ends
    from hfsdk.session.serving import ServeOptions, Server, token_file
    from hfsdk.session.wire import PORT

    hold_ends()  # awaited below: Ray would write about them
    parser = argparse.ArgumentParser(prog="python -m hfsdk.serve", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; elsewhere than on 127.0.0.1 it needs a certificate")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--address", help='of the Ray cluster, "auto" or host:port; by default the sessions of this machine alone')
    parser.add_argument("--certificate", help="for TLS: a PEM file")
    parser.add_argument("--key", help="its key, a PEM file")
    parser.add_argument("--token-file", type=Path, help="by default one in ~/.local/state/hfsdk, made where there is none")
    given = parser.parse_args(arguments)
    try:
        file = given.token_file or token_file()
        token = file.read_text(encoding="utf-8").strip()
        server = Server(ServeOptions(given.host, given.port, token, given.address, given.certificate, given.key))
    except (HfsdkError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    scheme, web = ("hfsdks", "https") if given.certificate else ("hfsdk", "http")
    sys.stdout.write(
        f"serving kept sessions at {scheme}://{given.host}:{server.port}/NAME, and for a browser at "
        f"{web}://{given.host}:{server.port}/?token=...; the token is in {file}\n"
    )
    sys.stdout.flush()
    serving = threading.Thread(target=server.run, name="hfsdk-serve", daemon=True)
    serving.start()
    await_end()
    server.close()
    serving.join(5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
