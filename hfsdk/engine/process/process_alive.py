"""Whether a process that was written down is still there: by its number and the time at which it started."""

from __future__ import annotations

START_TOLERANCE_S = 2.0
"""Start times of a process are equal within this much: they are counted from a boot time that is read from the clock."""


def is_there(pid: int, started: float) -> bool:
    """Return whether a process of this machine is there, and not another one of its number.

    Args:
        pid: the process's number.
        started: when it started, in seconds since 1970, as its system counts it.

    Raises:
        psutil.AccessDenied: the system does not tell this user.
    """
    import psutil  # which a kernel outside the cluster has not, and needs not

    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < START_TOLERANCE_S and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
