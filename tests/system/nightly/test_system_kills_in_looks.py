"""A worker killed at requests of a deed that changes nothing: each role is as before, or at its checkpoint, bit for bit.

The kill is planted: the runtime's k-th request to a worker is its last one. So no moment is left to chance.
"""

import contextlib
import os
import signal
import warnings
from types import SimpleNamespace

import pytest
from system_helpers import declare, declare_lora, pids, ppo_step

import hfsdk as hf
from benchmarks.fire.state_digest import of_parts, parts_of_rank
from hfsdk.session.parts import parts_of

REQUESTS = ("call", "keep", "restore", "load", "export", "holds")
"""Of the runtime, those that go to a role's workers."""


class Asked:
    """The requests of a runtime, in their order; before one of them a worker is killed."""

    def __init__(self, runtime, monkeypatch):
        self.seen, self.at, self.victim = [], None, None
        for name in REQUESTS:
            monkeypatch.setattr(runtime, name, self.told(name, getattr(runtime, name)))

    def told(self, name, method):
        def asked(*given, **named):
            number = len(self.seen)
            self.seen.append(name if name != "call" else given[0].call.method)
            if number == self.at:
                os.kill(self.victim, signal.SIGKILL)
            return method(*given, **named)

        return asked

    def begin(self, at=None, victim=None):
        self.seen, self.at, self.victim = [], at, victim


@pytest.fixture(params=["two pools, LoRA", "one pool"])
def roles(request, ray_here, tmp_path):
    with hf.Session(devices=2, seed=7, name="looks") as session:
        found = (
            declare_lora(session, train="auto") if "LoRA" in request.param else declare(session, train="auto", train_critic="auto")
        )
        session.place("colocate" if request.param == "one pool" else {"actor reference": 1, "critic": 1})
        found.num_pools = 1 + (request.param != "one pool")
        ppo_step(found).actor.wait()
        session.save(tmp_path / "saved")
        found.saved, found.tmp_path = tmp_path / "saved", tmp_path
        yield found


@pytest.fixture
def asked(roles, monkeypatch):
    return Asked(parts_of(roles.session).client._controller._runtime, monkeypatch)


def digests(roles):
    return {role.name: of_parts(role.run(parts_of_rank)) for role in (roles.actor, roles.critic)}


def settled(roles):
    """Look at the roles, after what nobody has heard of yet was told."""
    with contextlib.suppress(hf.HfsdkError):
        digests(roles)
    return digests(roles)


def aged(roles):
    """Return a batch of weights that a snapshot keeps; the generating engine has newer ones."""
    roles.session.snapshot("then")
    batch = roles.actor.generate(roles.prompts[0], max_new_tokens=6).wait()
    ppo_step(roles).actor.wait()
    roles.actor.generate(roles.prompts[0], max_new_tokens=2).wait()
    return batch


def explain(roles, batch):
    return "with the weights of then" in roles.actor.explain_gap(batch).verdict


def ran(roles):
    return roles.session.train(hf.PPO(max_new_tokens=6), roles.prompts, steps=2, look_back=2, progress=False)


def search(roles, run):
    return run.first_bad(step=run.rows[-1]["step"]) is None


def export(roles, _):
    return roles.actor.save_pretrained(roles.tmp_path / "exported", merge=True).is_dir()


LOOKS = {"explain_gap": (aged, explain), "first_bad": (ran, search), "export": (lambda roles: None, export)}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_dies_in_a_look_each_role_is_as_before_or_at_its_checkpoint(roles, asked, look):
    prepare, do = LOOKS[look]

    def arranged():
        for name in list(roles.session.snapshots):
            roles.session.forget(name)
        roles.session.load(roles.saved)
        checkpoint = digests(roles)
        given = prepare(roles)
        return SimpleNamespace(checkpoint=checkpoint, given=given, before=digests(roles))

    now = arranged()
    asked.begin()
    assert do(roles, now.given), "it looks where it should"
    requests = asked.seen
    assert digests(roles) == now.before, "undisturbed it changes nothing"
    for at in chosen(requests):
        for rank in range(2) if roles.num_pools == 2 else [at % 2]:
            now = arranged()
            asked.begin(at, pids(roles.session)[rank])
            with contextlib.suppress(hf.HfsdkError), warnings.catch_warnings(action="ignore"):
                do(roles, now.given)
            asked.begin()
            for name, digest in settled(roles).items():
                states = {now.before[name]: "as before", now.checkpoint[name]: "at its checkpoint"}
                assert digest in states, f"{name} after worker {rank} was killed at request {at} of {requests}"


def chosen(requests):
    """Return some requests: where a deed goes over to something else, the last way back to an earlier state, the end."""
    firsts = [at for at, name in enumerate(requests) if at == 0 or name != requests[at - 1]]
    some = {firsts[part * (len(firsts) - 1) // 4] for part in range(5)}
    back = [at for at, name in enumerate(requests) if name == "restore"][-1:]
    return sorted({*some, *back, len(requests) - 1})
