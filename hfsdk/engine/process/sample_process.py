"""A process that runs a reward function on one sample after another, for `hfsdk.engine.process.sample_workers`.

``python -m hfsdk.engine.process.sample_process CHANNEL TRACES PARENT``: file descriptors to talk over and to write tracebacks to,
and the process that it dies with. It ends when its channel is closed, and, where the function holds it up, with its parent (Linux).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hfsdk.core.errors import RewardFunctionError
from hfsdk.core.functions import Shipped
from hfsdk.core.sample_outcome import SampleOutcome
from hfsdk.core.unscored import is_unscored
from hfsdk.engine.process.tasks import USER_ERRORS, call_reward, check_scores, check_token_scores, user_traceback
from hfsdk.engine.process.user_lines import line_of_error

PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal that this process gets when its parent ends."""

PARENT_SEEN_S = 1.0
"""How often a process elsewhere than on Linux looks whether its parent is still there."""


def outcome_of(function: Callable[..., Any], name: str, arguments: Mapping[str, Any], num_tokens: int | None) -> SampleOutcome:
    """Run a reward function on lists of one sample, and return the outcome.

    Args:
        function: the reward, in TRL's form.
        name: its name in messages.
        arguments: prompts, completions, completion_ids and the data's columns, a list of one each.
        num_tokens: the response's tokens, where each token is to be scored; ``None`` for one number.
    """
    began = time.perf_counter()
    try:
        scores = call_reward(function, name, arguments)
    except RewardFunctionError as error:
        seconds, line = time.perf_counter() - began, line_of_error(error.__context__ or error)
        return SampleOutcome(failure="raised", message=error.message, line=line, details=error.details, seconds=seconds)
    seconds = time.perf_counter() - began
    try:
        if num_tokens is not None:
            row = check_token_scores(scores, name, [num_tokens])[0]
            unscored = scores[0] is None
            return SampleOutcome(score=None if unscored else tuple(row), seconds=seconds)
        score = check_scores(scores, name, 1)[0]
    except RewardFunctionError as error:
        return SampleOutcome(failure="is no score", message=error.message.replace(" for sample 0", ""), seconds=seconds)
    return SampleOutcome(score=None if is_unscored(np.asarray(score)) else score, seconds=seconds)


def die_with(parent: int) -> None:
    """Have this process end when its parent does, whatever it is doing then; on Linux the kernel sees to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SEEN_S)
    os._exit(1)


def serve(channel: Connection) -> None:
    """Take the function and say whether it could be loaded, then answer sample after sample until the channel is closed."""
    try:
        shipped: Shipped = channel.recv()
        try:
            function = shipped.load()
        except USER_ERRORS as error:  # whatever importing the user's modules raises
            channel.send(SampleOutcome(failure="raised", message=f"{shipped.name} could not be loaded: {error!r}",
                                   line=line_of_error(error), details=user_traceback(error)))  # fmt: skip
            return
        channel.send(SampleOutcome())
        while True:
            values, num_tokens = channel.recv()
            channel.send(outcome_of(function, shipped.name, values, num_tokens))
    except (EOFError, ConnectionError):
        return


def main() -> None:
    """Serve samples on the channel whose number is the first argument, until the parent closes it or ends."""
    channel, traces, parent = map(int, sys.argv[1:])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the notebook, which cancels the call
    if sys.platform != "win32":
        faulthandler.register(signal.SIGUSR1, file=traces, all_threads=False)
    serve(Connection(channel))


if __name__ == "__main__":
    main()
