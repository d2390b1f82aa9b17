"""Proof of weights in a session: every way that weights go is proven, and what is planted on the way is found and named."""

import numpy as np
import pytest
from system_helpers import OPENINGS
from test_system_reshard import PARAMETER, plant

import hfsdk as hf

PROMPTS = [text + " " for text in OPENINGS[:4]]


def plant_in_state(rank):
    """On rank 0: a state that was taken over changes in one number."""
    from hfsdk.engine.training.shares import ShareOfModel

    if rank.rank != 0:
        return
    before = ShareOfModel.write

    def write_and_harm(self, share):
        before(self, share)
        ShareOfModel.write = before
        dict(self._model.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"].data[2, 3] += 1.0

    ShareOfModel.write = write_and_harm


def plant_in_kernel(rank):
    """On rank 0: vLLM packs another weight than it was given."""
    from hfsdk.engine.generation import cpu_support_vllm

    if rank.rank != 0:
        return
    before = cpu_support_vllm._dispatch

    def dispatch():
        cpu_support_vllm._dispatch = before
        pack, seen = before(), []

        def pack_another(layer, freed):
            seen.append(layer)
            if len(seen) == 3:
                layer.weight.data[1, 2] += 0.5
            pack(layer, freed)

        return pack_another

    cpu_support_vllm._dispatch = dispatch


@pytest.fixture(scope="module", params=["packed", "shared"])
def session(request, ray_here):
    with hf.Session(devices=2, seed=5, name=f"proof {request.param}") as session:
        session.actor("tiny", train="tp2", rollout="tp1", cpu_weights=request.param, optimizer=hf.AdamW(lr=1e-3))
        yield session


@pytest.fixture(scope="module")
def actor(session):
    return session.models.actor


def greedy(actor):
    return actor.generate(PROMPTS, max_new_tokens=4, temperature=0.0)["response"].flat


@pytest.mark.parametrize("harm", ["number", "stride", "older"])
def test_what_is_planted_on_the_way_is_found_and_named(session, actor, harm):
    expected = greedy(actor)
    good = session.snapshot("good")
    assert np.array_equal(greedy(actor), expected)
    report = actor.last_reshard
    assert report.verified
    assert report.boxes() == {"proven": len(report.plan.moves), "unproven": 0, "wrong": 0}
    actor.run(plant, harm)
    with pytest.raises(hf.WeightMismatchError, match=rf"{PARAMETER}\[.*\] from rank \d to rank 1: 0x\w{{16}} left, 0x\w{{16}}"):
        greedy(actor)
    report = actor.last_reshard
    assert not report.verified
    assert {(wrong.tensor, wrong.target) for wrong in report.wrong} == {(PARAMETER, 1)}
    assert report.boxes()["wrong"] == len(report.wrong)
    own = {wrong.source for wrong in report.wrong} == {0, 1}  # half of the parameter is rank 1's own
    if own and actor.census().to_pandas()["moment"][1] == "generating":  # and was nowhere else
        for _ in range(2):
            with pytest.raises(
                hf.WeightMismatchError, match=r"weights that actor's rollout gave back are not those it got\. The tr"
            ):
                greedy(actor)
        session.rewind(good)
    assert own == (harm != "number")
    assert np.array_equal(greedy(actor), expected)
    assert actor.last_reshard.verified


def test_a_state_that_is_not_what_it_was_is_found(session, actor, tmp_path):
    session.save(tmp_path)
    actor.run(plant_in_state)
    with pytest.raises(
        hf.WeightMismatchError, match=rf"{PARAMETER} of actor on ranks \[0, 1\] is not what the save had: 0x\w+ left"
    ):
        session.load(tmp_path)
    session.load(tmp_path)
    snapshot = session.snapshot("before")
    actor.run(plant_in_state)
    with pytest.raises(hf.WeightMismatchError, match="is not what the snapshot had"):
        session.rewind(snapshot)
    session.rewind(snapshot)
    greedy(actor)
    assert actor.last_reshard.verified


def test_a_kernel_that_packs_another_weight_is_found(actor):
    if actor.census().to_pandas()["moment"][0] != "both":
        return  # nothing is packed
    expected = greedy(actor)
    actor.run(plant_in_kernel)
    with pytest.raises(
        hf.WeightMismatchError, match=r"model\.layers\.\d\.\S+: the packed weight does not multiply as the plain one"
    ):
        greedy(actor)
    assert np.array_equal(greedy(actor), expected)


def perturb(rank):
    """What the rollout generates by is another model from the next time that it gets weights: after they were proven."""
    from hfsdk.engine.generation.rollout import Rollout

    before = Rollout.finish_update

    def finish_update(self):
        self._model.model.norm.weight.data.mul_(1.5)
        before(self)

    Rollout.finish_update, Rollout.unperturbed = finish_update, before


def undo(rank):
    from hfsdk.engine.generation.rollout import Rollout

    Rollout.finish_update = Rollout.unperturbed


def brevity(completions):
    return [-len(text) / 64 for text in completions]


def test_a_run_checks_as_much_as_it_is_asked_to(session, actor):
    session.reward(brevity)
    prompts, algorithm = session.prompts(PROMPTS, batch_size=4), hf.GRPO(max_new_tokens=4, n=2, kl_coef=0.0)
    with pytest.raises(hf.OptionError, match="or None; got 'heavy'"):
        session.train(algorithm, prompts, steps=1, check="heavy")
    run = session.train(algorithm, prompts, steps=1, check="full", progress=False)
    assert 0.0 <= run.rows[0]["replay_gap_max"] < 1e-3
    assert "replay_gap_max" not in session.train(algorithm, prompts, steps=1, progress=False).rows[0]
    if session.name.endswith("shared"):
        return  # on one storage the trainer would be another model, too
    actor.run(perturb)
    with pytest.warns(hf.InvariantWarning) as caught:
        found = session.train(algorithm, prompts, steps=1, check="full", progress=False).rows[0]
    first_words = {str(warning.message).split()[0] for warning in caught}
    assert first_words == {"replay_gap_max", "rollout_gap"}
    assert found["replay_gap_max"] == pytest.approx(found["rollout_gap_max"]), "all eight rows"
    session.train(algorithm, prompts, steps=1, check=None, progress=False)  # a warning would be an error
    actor.run(undo)
