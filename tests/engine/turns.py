"""Handing over the processor: other threads get their turns while one is inside something, without a clock."""

import threading


def let_others_run(times=20):
    """Wait for so many threads to start and end: whoever else waits for the interpreter has run meanwhile."""
    for _ in range(times):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
