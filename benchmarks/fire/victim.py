"""The user's process of ``drivers``: loads what there is, then learns and saves for ever; says what it does, a line of JSON each.

python -m fire.victim FOLDER BEHIND
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import hfsdk as hf
from fire import own
from hfsdk.session.parts import parts_of


def say(**found: Any) -> None:
    """Tell whoever started this."""
    print(json.dumps(found), flush=True)


def digest(rank: Any) -> str:
    """Return a digest of a rank's weights, on one device all there are."""
    import hashlib

    found = hashlib.sha256(str(rank.num_updates).encode())
    for _, tensor in sorted(rank.module.named_parameters()):
        found.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


def loss(out: Any, b: Any) -> Any:
    """Any loss does."""
    return (out.values - 1.0) ** 2


def main(folder: Path, behind: bool) -> None:
    """See the module."""
    say(starting=True)
    session = hf.Session(devices=1, seed=5, name="victim")
    runtime = parts_of(session).client._controller._runtime  # type: ignore[attr-defined]
    say(job=str(runtime._job_id))
    critic = session.critic("tiny", optimizer=hf.AdamW(lr=1e-3), **own.adapters(4))
    batch = session.batch(prompt=[[1, 2, 3]] * 4, response=[[4, 5], [6], [7, 8, 9], [10]])
    if (folder / "session.json").exists():
        session.load(folder)
        say(loaded=critic.run(digest)[0], states=len(list(folder.glob("state-*"))))
    else:
        say(loaded=None, states=0)
    number = 0
    while True:
        number += 1
        critic.update(batch, loss).wait()
        say(saving=critic.run(digest)[0])
        if behind:
            saving = session.save(folder, wait=False)
            critic.compute_values(batch).wait()
            saving.wait()
        else:
            session.save(folder)
        say(saved=number, states=len([path for path in folder.glob("state-*") if path.is_dir()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1")
