"""The laws of what trainers do on accelerators, for the layouts and models of a module's ``SWEEP``.

The models, rows and losses are those of ``trainer_laws``; a trainer that does all of it stands beside one that does nothing of it.
"""

import itertools

import pytest
import torch
from layout_sweep import of
from trainer_harness import NUM_ROWS, Harness, by_row, equal, farthest, is_critic, loss_of, policy_loss
from trainer_laws import case, tied_of  # noqa: F401
from whole_state import set_state, state_of

from hfsdk.core.layout import Layout
from hfsdk.core.microbatch import PassPlan
from hfsdk.core.roles import AdamW, RoleSpec
from hfsdk.core.training_choices import TrainingChoices, choose_training
from hfsdk.planner.perf import memory
from hfsdk.planner.perf.memory import role_bytes

SMALL = 5_000
"""Gradients of a bucket: several in models of about 80,000 parameters."""


def choices_of(h):
    wanted = choose_training(on_cpu=False, tp=h.groups.tp_size, dp=h.groups.dp_size)
    return TrainingChoices(**(vars(wanted) | {"bucket_elements": SMALL if wanted.overlap else None}))


def both(h, name, **options):
    """A trainer that does nothing of it, and one that does all."""
    return h.trainer(name, **options), h.trainer(name, choices=choices_of(h), **options)


def check_log_probs(h):
    plan, micro_batches = h.passes()
    rows, found = h.mine(h.rows(), plan), {}
    for name in h.models:
        frozen = h.trainer(name, optimizer=None, choices=choices_of(h))
        if is_critic(name):
            out = frozen.values(rows, micro_batches)["values"] if h.groups.is_last_stage else ()
            if not h.groups.is_last_stage:
                frozen.values(rows, micro_batches)
        else:
            out = frozen.log_probs(rows, micro_batches, rows["temperature"]).get("log_probs", ())
        found[name] = dict(zip(rows.row_ids.tolist() if len(out) else (), out, strict=True))
    return found


def check_gradients(h):
    found = {}
    for name in h.models:
        trainer, loss = h.trainer(name, choices=choices_of(h)), loss_of(name)
        temperature = 1.0 if is_critic(name) else h.rows()["temperature"]
        metrics = trainer.forward_backward(h.rows(name), h.plan()[0], loss, temperature)
        norm = sum(g.double().pow(2).sum() for g in h.gradients[name][1].values()) ** 0.5
        norm_off = trainer.grad_norm() / float(norm) - 1
        once = h.difference(trainer.gradients(), h.gradients[name][1])
        for _ in range(2):  # what was summed over ranks must not be summed again
            trainer.forward_backward(h.rows(name), h.plan()[0], loss, temperature)
            trainer.grad_norm()
        thrice = h.difference(trainer.gradients(), {n: 3 * g for n, g in h.gradients[name][1].items()})
        recomputed = h.trainer(name, choices=choices_of(h), recompute="full")
        recomputed.forward_backward(h.rows(name), h.plan()[0], loss, temperature)
        again = h.difference(recomputed.gradients(), h.gradients[name][1])
        found[name] = (once, thrice, again, norm_off, metrics["loss"] - h.gradients[name][0])
    return found


def check_updates(h):
    """Four steps of both, in both dtypes; then the state of one in the other."""
    found = {}
    for name, dtype in ((tied_of(h), "fp32"), (h.models[-1], "bf16")):
        plain, fast = both(h, name, dtype=dtype)
        rows, plan, loss = h.rows(name), h.plan(mini_batches=2, epochs=2), loss_of(name)
        norms = [[m["grad_norm"] for m in trainer.update(rows, plan, loss)] for trainer in (plain, fast)]
        states = [state_of(trainer) for trainer in (plain, fast)]
        set_state(plain, states[1])
        set_state(fast, states[0])
        swapped = equal(state_of(plain), states[1]) and equal(state_of(fast), states[0])
        set_state(fast, states[1])
        once = fast.update(rows, plan[:2], loss), state_of(fast)
        set_state(fast, states[1])
        twice = fast.update(rows, plan[:2], loss), state_of(fast)
        halves = h.trainer(name, dtype=dtype, choices=choices_of(h))
        set_state(halves, states[1])
        for mini in plan[:2]:
            halves.forward_backward(rows, mini, loss)
            halves.step()
        same = [equal(once[1], twice[1]), once[0] == twice[0], equal(once[1], state_of(halves))]
        found[name, dtype] = norms, farthest(*states), swapped, same
    return found


def check_offload(h):
    stays, leaves = (h.trainer("untied", choices=choices_of(h), optimizer=h.adamw(offload=offload)) for offload in (False, True))
    for trainer in (stays, leaves):
        trainer.update(h.rows(), h.plan(mini_batches=2), policy_loss)
    middle = state_of(leaves)
    leaves.update(h.rows(), h.plan(), policy_loss)
    set_state(leaves, middle)
    for trainer in (stays, leaves):
        trainer.update(h.rows(), h.plan(), policy_loss)
    return equal(state_of(stays), state_of(leaves)), stays.memory_bytes(), leaves.memory_bytes()


def uneven(h, mini, last_of):
    """The mini-batch with all micro-batches of the other dp ranks first: only ``last_of`` has any at the end."""
    mine = mini.passes.micro_batches
    most = max(len([m for m in micro if m]) for micro in mine)
    filled = [[m for m in micro if m] for micro in mine]
    moved = [
        [()] * most + m + [()] * (most - len(m)) if i == last_of else m + [()] * (2 * most - len(m)) for i, m in enumerate(filled)
    ]
    return type(mini)(mini.epoch, mini.index, mini.rows, PassPlan(tuple(map(tuple, moved))), mini.num_tokens, mini.num_rows)


def check_overlap(h):
    """Which buckets start where, with shares that are empty at the end, and that an interrupted pass leaves nothing behind."""
    from hfsdk.engine.process.safepoint import SafePoint

    fast, plain = h.trainer("untied", choices=choices_of(h)), h.trainer("untied")
    rows, plan = h.rows(), h.plan(mini_batches=2, max_tokens=60)
    order, during = [], []

    def spy(number, group):
        start = group.start_grad_sync

        def told(**more):
            if group.grad_reduce_handle is None:
                order.append(number)
                during.append(any(span.name == "backward" and "tokens" in span.attrs for span in fast.recorder.running))
            start(**more)

        group.start_grad_sync = told

    groups = fast._ddp.bucket_groups
    for number, group in enumerate(groups):
        spy(number, group)
    fast.update(rows, plan[:1], policy_loss)
    straight = list(order), list(during)
    order.clear()
    fast.update(rows, [uneven(h, plan[1], 0)], policy_loss)
    shares_end_apart = list(order)
    plain.update(rows, plan, policy_loss)
    apart = farthest(state_of(fast), state_of(plain))

    before, stopped = state_of(fast), []

    def raising(out, b):
        if h.groups.rank == h.mesh.layout.size - 1:
            raise KeyError("the user's own mistake")
        return out.log_probs

    def not_finite(out, b):
        return out.log_probs * float("nan")

    asked = itertools.count()
    last = -(-plan[0].passes.num_micro_batches // fast.pipeline.chunk)
    cancelled = SafePoint(lambda: next(asked) >= last)  # at the last agreement, when all has been summed
    for loss, safe in ((raising, None), (not_finite, None), (policy_loss, cancelled)):
        try:
            fast.update(rows, plan[:1], loss, **({} if safe is None else {"safe": safe}))
        except Exception as caught:
            stopped.append((type(caught).__name__, equal(before, state_of(fast)), fast.grad_norm()))
    return len(groups), straight, shares_end_apart, apart, stopped


def check_kept(h):
    """Bytes of what a forward pass keeps for the backward pass, of a trainer that does nothing of it and of one that does all."""
    from hfsdk.engine.training.loss import ModelInput

    found = []
    for trainer in both(h, "untied"):
        kept, weights = {}, {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}

        def keep(tensor, kept=kept, weights=weights):
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage()._cdata] = tensor  # and its storage, so that no other gets its place
            return tensor

        micro = ModelInput.of(h.rows(), h.groups.device, multiple=h.groups.tp_size)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.model(*micro.arguments)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return (*found, len(micro.tokens_T), trainer.spec)


def check_exchange(h):
    """How often stages send in an update, and how often they exchange hidden states or gradients."""
    import torch.distributed as dist

    trainer, sent, exchanged = h.trainer("untied"), [], []
    send, exchange = dist.batch_isend_irecv, trainer.pipeline._communicator._communicate
    trainer.pipeline._communicator._communicate = lambda **more: exchanged.append(1) or exchange(**more)
    dist.batch_isend_irecv = lambda ops: sent.append(len(ops)) or send(ops)
    try:
        trainer.update(h.rows(), h.plan(), policy_loss)
    finally:
        dist.batch_isend_irecv = send
    return len(sent), len(exchanged), max(sent)


CHECKS = {
    "log_probs": check_log_probs, "gradients": check_gradients, "updates": check_updates, "offload": check_offload,
    "kept": check_kept, "exchange": check_exchange, "overlap": check_overlap,
}  # fmt: skip
HARNESS = Harness


# ---- the laws


@of("log_probs")
def test_outputs_are_those_of_transformers(case, results, layout):  # noqa: F811
    ranks = results(layout, "log_probs")
    for name in ranks[0]:
        mine = by_row([rank[name] for rank in ranks], NUM_ROWS)
        expected = case["references"][name].columns["values" if is_critic(name) else "log_probs"].detach().numpy()
        assert abs(mine - expected).max() < 1e-4, name


@of("gradients")
def test_gradient_is_that_of_plain_pytorch(results, layout):
    for name, found in results(layout, "gradients")[0].items():
        once, thrice, recomputed, norm, loss = found
        assert max(once, thrice, recomputed, abs(norm), abs(loss)) < 1e-5, (name, found)


@of("updates")
def test_what_is_learned_is_the_same_and_so_is_the_form_of_the_state(results, layout):
    for rank in results(layout, "updates"):
        for (name, dtype), ((plain, fast), apart, swapped, same) in rank.items():
            # in bfloat16 the loss nearly gone is what rounding makes of it, which is another on each kind of processor
            assert fast == pytest.approx(
                plain, rel=1e-4 if dtype == "fp32" else 0.05, abs=0 if dtype == "fp32" else 0.02 * plain[0]
            ), name
            assert swapped
            assert all(same), (name, same)
            assert apart["step"] == 0
            if dtype == "fp32":
                assert max(apart["exp_avg"], apart["exp_avg_sq"]) <= 2e-3, (name, apart)


@of("offload")
def test_an_offloaded_optimizer_steps_alike(results, layout):
    for same, stays, leaves in results(layout, "offload"):
        assert same
        assert stays["optimizer"] > 0 == leaves["optimizer"]


@of("overlap")
def test_buckets_start_in_order_during_the_last_backward_pass(results, layout):
    for rank, (number, (order, during), uneven_order, apart, _) in enumerate(results(layout, "overlap")):
        assert number > 3 or "pp2" in layout, "the stages behind the first have one bucket"
        assert order == uneven_order == list(range(number)), rank
        assert during.count(True) >= number - 1
        assert apart["main"] <= 1e-3
        assert apart["exp_avg"] <= 2e-3


@of("overlap")
def test_a_pass_that_is_stopped_leaves_no_sum_under_way(results, layout):
    for rank in results(layout, "overlap"):
        names = [name for name, _, _ in rank[4]]
        assert names[0] in ("KeyError", "PeerFailed")
        assert names[1:] == ["NonFiniteRows", "Cancelled"]
        assert all(unchanged and norm == 0 for _, unchanged, norm in rank[4])


@of("kept")
def test_sequence_parallelism_keeps_at_least_as_much_less_as_is_planned(results, monkeypatch, layout):
    """Of the 6 h a layer that are planned for on processors, 2 are masks of dropout, which is not there to be cut."""
    for whole, cut, tokens, spec in results(layout, "kept"):
        role = RoleSpec(name="actor", kind="actor", model=spec, train=Layout(tp=2), optimizer=AdamW(), micro_batch_tokens=tokens)
        planned = [role_bytes(role, 2, on_cpu=True).activations]
        with monkeypatch.context() as changed:
            changed.setattr(memory, "choose_training", lambda **_: TrainingChoices(sequence_parallel=True))
            planned.append(role_bytes(role, 2, on_cpu=True).activations)
        assert whole - cut >= 4 / 6 * (planned[0] - planned[1]) > 0.1 * planned[0]


@of("exchange")
def test_stages_send_once_for_each_exchange(results, layout):
    """Megatron would send shapes first; and what goes both ways goes together."""
    for sent, exchanged, together in results(layout, "exchange"):
        assert sent == exchanged >= 4
        assert together == 2
