"""What a simulated role has learned and holds: its updates go back with a rewind, its moments come with the first step."""

import hfsdk as hf


def loss(out, b):
    return out.log_probs


def test_a_rewind_takes_updates_back_and_a_save_after_it_has_those_of_then(tmp_path):
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        batch = session.batch(prompt=[[1], [2]], response=[[1], [2]])
        actor.update(batch, loss).wait()
        then = session.snapshot("then")
        for _ in range(2):
            actor.update(batch, loss).wait()
        session.rewind(then)
        assert actor.version == 1
        session.save(tmp_path)
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        session.load(tmp_path)
        assert actor.version == 1


def test_moments_are_held_from_the_first_step_on():
    with hf.Session.simulated("1x2 A100-80GB") as session:
        actor = session.actor("tiny")
        batch = session.batch(prompt=[[1], [2]], response=[[1], [2]])

        def held(call):
            call.wait()
            spans = [span for span in session.trace if span.device == 0 and "optimizer_bytes" in span.attrs]
            return spans[-1].attrs["optimizer_bytes"]

        assert held(actor.compute_log_probs(batch)) == 0
        actor.update(batch, loss).wait()
        assert held(actor.compute_log_probs(batch)) == 2 * 4 * actor.spec.num_parameters()
