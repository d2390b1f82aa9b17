"""How the nouns look: placement, timeline, tables, curves; live and frozen.

Nothing is loaded here. ``hfsdk.viz.frame`` says how a picture is built; ``register_hooks`` teaches a running IPython to
draw the nouns, which themselves only return plain view data.
"""

from __future__ import annotations

import sys


def register_hooks() -> bool:
    """Register the display hooks with the IPython that runs, if one does; returns whether one did."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return False
    from hfsdk.viz.hooks import register

    register(shell)
    return True
