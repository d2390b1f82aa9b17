"""What is planted in a run of the shared session, and a search for it that must leave the session alone."""

import contextlib
import warnings

from system_helpers import fingerprint

import hfsdk as hf


def see_failures(roles):
    """Meet the failures of each role that nobody has looked at: those beside the one that a run has raised."""
    for role in (roles.actor, roles.critic):
        with contextlib.suppress(hf.NonFiniteLossError):
            role.run(fingerprint)


def where(session, roles):
    """What of a session a search must leave alone."""
    history = [(row["kind"], row.get("step")) for row in session.history]
    weights = {role.name: role.run(fingerprint) for role in roles}
    return {**weights, "prompts": session.run.prompts.position, "branch": session.branch, "history": history}


def search(found, roles=("actor", "critic")):
    """Return the first bad number; the session is where it was."""
    before = where(found.session, [getattr(found, role) for role in roles])
    bad = found.run.first_bad()
    after = where(found.session, [getattr(found, role) for role in roles])
    differs = {name: (before[name], value) for name, value in after.items() if value != before[name]}
    assert not differs, differs
    assert bad.left.startswith("the session is where it was")
    return bad


def again(found, bad):
    """Run the cell that gets the number again; return the value of its last line."""
    *lines, last = bad.code.splitlines()
    names = {"session": found.session, "hf": hf}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("\n".join(lines), names)
        return eval(last.strip(), names)
