"""A TCP proxy on 127.0.0.1, in a process of its own, that delays, throttles and cuts connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys


class Proxy:
    """Passes connections on to a port of this machine; each way takes ``delay_s``, at no more than a rate."""

    def __init__(self, target, delay_s=0.0, bytes_per_s=0.0):
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(target), str(delay_s), str(bytes_per_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.port = self._ask("port")

    def _ask(self, what):
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def cut(self):
        """Cut every connection, as a network does."""
        self._ask("cut")

    @property
    def num_connections(self):
        """Connections so far."""
        return self._ask("connections")

    @property
    def num_bytes(self):
        """Bytes so far, of both ways."""
        return self._ask("bytes")

    def close(self):
        """End the proxy."""
        self._process.communicate()


class Lines:
    """What the process does."""

    def __init__(self, target, delay_s, bytes_per_s):
        self._target, self._delay_s, self._bytes_per_s = target, delay_s, bytes_per_s
        self._open = set()
        self.connections = self.bytes = self.port = 0

    async def serve(self):
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            what = line.strip()
            if what == "cut":
                for writer in [writer for pair in self._open for writer in pair]:
                    writer.transport.abort()
            print(json.dumps(getattr(self, what, None)), flush=True)

    async def _on_connection(self, reader, writer):
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self.connections += 1
        self._open.add((writer, back))
        with contextlib.suppress(asyncio.CancelledError):  # the proxy ends
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))
        self._open.discard((writer, back))

    async def _pass_on(self, reader, writer):
        queue, loop = asyncio.Queue(), asyncio.get_running_loop()

        async def read():
            free_s = loop.time()
            with contextlib.suppress(OSError):
                while data := await reader.read(16384):
                    self.bytes += len(data)
                    free_s = max(free_s, loop.time()) + (len(data) / self._bytes_per_s if self._bytes_per_s else 0.0)
                    queue.put_nowait((free_s + self._delay_s, data))  # the line is busy until then
            queue.put_nowait((0.0, b""))

        async def write():
            with contextlib.suppress(OSError):
                while True:
                    due_s, data = await queue.get()
                    if not data:
                        break
                    if due_s > loop.time():
                        await asyncio.sleep(due_s - loop.time())
                    writer.write(data)
                    await writer.drain()
            writer.close()

        await asyncio.gather(read(), write())


if __name__ == "__main__":
    asyncio.run(Lines(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])).serve())
