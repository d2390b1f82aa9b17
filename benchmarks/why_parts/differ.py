"""Why trainer and rollout differ: what is said of planted causes, and of healthy runs over layouts and dtypes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hfsdk as hf

PART = "differ"
PROMPTS = [
    "the film is a", "a warm and funny", "it never quite",
    "a prompt of more than thirty-two tokens, so that whole blocks of it stand in the prefix cache",
]  # fmt: skip
TOGETHER = [("tp2", "dp2"), ("dp2", "dp2"), ("pp2", "dp2"), ("tp2", "tp2"), ("dp2", "tp2"), ("pp2", "tp2")]
"""Layouts of training and rollout on the same two devices."""
APART = [("tp2", "tp2"), ("dp2", "dp2")]
"""The same on two and two."""


def rows() -> list[dict[str, Any]]:
    """Return the figures: part, what, value, unit, target, ok."""
    found = []
    with hf.Session(devices=2, seed=3, name="planted") as session:
        actor = session.actor("tiny", train="tp2", rollout="dp2", optimizer=hf.AdamW(lr=1e-3))
        for what, (expected, plant) in PLANTED.items():
            asked, batch = plant(session, actor)
            begun = time.perf_counter()
            gap = asked.explain_gap(batch)
            seconds, named = time.perf_counter() - begun, gap.causes
            mend(actor)
            words = f"planted {what}: {gap.verdict}"
            found.append({"part": PART, "what": words, "value": seconds, "unit": "s", "target": None, "ok": named == (expected,)})
    for what, count, seconds in healthy():
        found.append(
            {"part": PART, "what": f"healthy {what}: causes named", "value": count, "unit": "", "target": 0, "ok": count == 0}
        )
        found[-1]["seconds"] = seconds
    return found


# ---- healthy runs


def healthy() -> list[tuple[str, int, float]]:
    """Return of each healthy run what it is, how many causes were named in two explanations, and the seconds of one."""
    found = []
    for rollout in ("dp2", "tp2"):
        with hf.Session(devices=2, seed=4, name="healthy") as session:
            number = 0
            for train, generating in TOGETHER:
                for dtype, weights in (("fp32", "packed"), ("bf16", "packed"), ("fp32", "shared")):
                    if generating != rollout or (weights == "shared" and train == "dp2"):
                        continue
                    number += 1
                    actor = session.actor(
                        "tiny", name=f"run{number}", train=train, rollout=rollout, dtype=dtype, cpu_weights=weights,
                        optimizer=hf.AdamW(lr=1e-3),
                    )  # fmt: skip
                    found.append((f"{train} -> {rollout} {dtype} {weights}", *_named(actor)))
                    actor.release()
    for train, rollout in APART:
        for dtype in ("fp32", "bf16"):
            with hf.Session(devices=4, seed=4, name="healthy, apart") as session:
                actor = session.actor("tiny", train=train, rollout=rollout, dtype=dtype, optimizer=hf.AdamW(lr=1e-3))
                session.place({"actor": 2, "actor.rollout": 2})
                found.append((f"{train} -> {rollout} {dtype} apart", *_named(actor)))
    return found


def _named(actor: Any) -> tuple[int, float]:
    batch = actor.generate(PROMPTS, max_new_tokens=12, temperature=0.8)
    begun = time.perf_counter()
    first = actor.explain_gap(batch)
    seconds = time.perf_counter() - begun
    actor.update(batch, likelihood).wait()
    second = actor.explain_gap(actor.compute_log_probs(actor.generate(PROMPTS, max_new_tokens=12)))
    return len(first.causes) + len(second.causes), seconds


def likelihood(out: Any, b: Any) -> Any:
    """A loss that makes what was generated likelier."""
    return -out.log_probs


# ---- planted causes: each returns the actor to ask, and the batch


def generated(actor: Any, prompts: list[str] = PROMPTS, **sampling: Any) -> Any:
    """Generate a few tokens."""
    return actor.generate(prompts, max_new_tokens=12, **sampling)


def by_value(session: Any, batch: Any, **changed: Any) -> Any:
    """Return the batch as data of the user's own, of which nobody knows how it was made."""
    names = ("prompt", "response", "rollout_log_probs")
    return session.batch(**{name: batch[name] for name in names} | changed)


def old_weights(session: Any, actor: Any) -> tuple[Any, Any]:
    """An update after the generation."""
    batch = generated(actor)
    actor.update(batch, likelihood).wait()
    return actor, batch


def snapshot_of_then(session: Any, actor: Any) -> tuple[Any, Any]:
    """An update after the generation, the rollout has its weights by now, and a snapshot those of then."""
    session.snapshot("then")
    batch = generated(actor)
    actor.update(batch, likelihood).wait()
    generated(actor, PROMPTS[:1]).wait()
    return actor, batch


def blamed_on_age(session: Any, actor: Any) -> tuple[Any, Any]:
    """Other tokens, in a batch that says that it is old and is not; a snapshot has the weights of then."""
    _, older = snapshot_of_then(session, actor)
    batch = generated(actor)
    backwards = hf.Ragged.of([row[::-1] for row in batch["prompt"]], np.int32)
    return actor, by_value(session, batch, prompt=backwards, policy_version=older["policy_version"])


def missed_move(session: Any, actor: Any) -> tuple[Any, Any]:
    """An update whose weights do not go to the rollout, though the batch claims them."""
    actor.update(generated(actor), likelihood).wait()
    actor.run(skip_the_move)
    return actor, generated(actor)


def forgotten_temperature(session: Any, actor: Any) -> tuple[Any, Any]:
    """Generated at 0.7, the column says 1."""
    batch = generated(actor, temperature=0.7)
    return actor, batch.with_columns(temperature=np.ones(len(batch), np.float32))


def unknown_temperature(session: Any, actor: Any) -> tuple[Any, Any]:
    """Generated at 0.7, and nobody knows."""
    return actor, by_value(session, generated(actor, temperature=0.7))


def forgotten_top_k(session: Any, actor: Any) -> tuple[Any, Any]:
    """Generated over five tokens, and nobody knows."""
    return actor, by_value(session, generated(actor, top_k=5))


def forgotten_top_p(session: Any, actor: Any) -> tuple[Any, Any]:
    """Generated over four fifths of the probability, and nobody knows."""
    return actor, by_value(session, generated(actor, top_p=0.8))


def forgotten_min_new_tokens(session: Any, actor: Any) -> tuple[Any, Any]:
    """Generated without an end in the first eight tokens."""
    return actor, generated(actor, min_new_tokens=8)


def edited_prompt(session: Any, actor: Any) -> tuple[Any, Any]:
    """One token of one prompt is another one after the generation."""
    batch = generated(actor)
    kept.append(batch)
    return actor, batch.with_columns(prompt=edited(batch))


def replaced_prompt(session: Any, actor: Any) -> tuple[Any, Any]:
    """The same, and the first prompts are gone."""
    batch = generated(actor)
    return actor, batch.with_columns(prompt=edited(batch))


kept: list[Any] = []
"""Batches that somebody still refers to."""


def edited(batch: Any) -> hf.Ragged:
    """Return the prompts with another fourth token in row 1."""
    tokens = [row.tolist() for row in batch["prompt"]]
    tokens[1] = [*tokens[1][:3], 90, *tokens[1][4:]]
    return hf.Ragged.of(tokens, np.int32)


def other_tokens(session: Any, actor: Any) -> tuple[Any, Any]:
    """The same, and nobody knows which it was."""
    batch = generated(actor)
    return actor, by_value(session, batch, prompt=edited(batch))


def read_special_token(session: Any, actor: Any) -> tuple[Any, Any]:
    """Prompts with an end of a turn that was generated from as one token, and is five bytes in the batch."""
    texts = [f"{text}<eos>and then" for text in PROMPTS]
    return actor, by_value(session, generated(actor, texts), prompt=hf.Ragged.of([list(text.encode()) for text in texts], np.int32))


def forgotten_template(session: Any, actor: Any) -> tuple[Any, Any]:
    """Generated from the chat template, and the batch has the text alone."""
    batch = generated(actor, session.prompts(PROMPTS, batch_size=4, chat=True, shuffle=False)[0])
    return actor, by_value(session, batch, prompt=generated(actor)["prompt"])


def replaced_template(session: Any, actor: Any) -> tuple[Any, Any]:
    """The same, and it is known what was generated from."""
    batch = generated(actor, session.prompts(PROMPTS, batch_size=4, chat=True, shuffle=False)[0])
    kept.append(batch)
    return actor, batch.with_columns(prompt=generated(actor)["prompt"])


def added_template(session: Any, actor: Any) -> tuple[Any, Any]:
    """Generated from the text, and the batch has it in the chat template."""
    chat = session.prompts(PROMPTS, batch_size=4, chat=True, shuffle=False)[0]
    return actor, by_value(session, generated(actor), prompt=chat["prompt"])


def doubled_beginning(session: Any, actor: Any) -> tuple[Any, Any]:
    """Generated behind one beginning of a sequence, and the batch has two."""
    batch = generated(actor, [f"<bos>{text}" for text in PROMPTS])
    twice = [[int(row[0]), *row.tolist()] for row in batch["prompt"]]
    return actor, by_value(session, batch, prompt=hf.Ragged.of(twice, np.int32))


def old_cache(session: Any, actor: Any) -> tuple[Any, Any]:
    """A prefix cache that outlives an update."""
    actor.update(generated(actor, PROMPTS[-1:]), likelihood).wait()
    actor.run(keep_the_cache)
    return actor, generated(actor, PROMPTS[-1:])


def changed_norm(session: Any, actor: Any) -> tuple[Any, Any]:
    """A norm of layer 1 that changes in the rollout after it has arrived."""
    generated(actor).wait()
    actor.run(bend, 1.2)
    return actor, generated(actor)


def changed_packed(session: Any, actor: Any) -> tuple[Any, Any]:
    """Packed weights of layer 2 that change in the rollout."""
    generated(actor).wait()
    actor.run(bend_packed, 1.2)
    return actor, generated(actor)


def changed_computation(session: Any, actor: Any) -> tuple[Any, Any]:
    """Attention of layer 2 of the rollout that returns a tenth more."""
    actor.run(bend_computation, 1.1)
    return actor, generated(actor)


def rounding_trainer(session: Any, actor: Any) -> tuple[Any, Any]:
    """A trainer in fp32 whose passes compute in bf16."""
    actor.run(pass_in_bf16)
    return actor, generated(actor)


def rounded_weights(session: Any, actor: Any) -> tuple[Any, Any]:
    """A rollout in fp32 whose weights are rounded to bf16 as they arrive."""
    actor.run(round_what_arrives)
    return actor, generated(actor)


def batch_in_bf16(session: Any, actor: Any) -> tuple[Any, Any]:
    """A batch of an actor in bf16, and one in fp32 is asked."""
    made = {
        name: session.actor("tiny", name=name, train="dp2", rollout="dp2", dtype=dtype)
        for name, dtype in (("exact", "fp32"), ("rounded", "bf16"))
    }
    return made["exact"], generated(made["rounded"])


PLANTED: dict[str, tuple[str, Callable[[Any, Any], tuple[Any, Any]]]] = {
    "weights one update old": ("version", old_weights),
    "weights one update old, a snapshot of then": ("version", snapshot_of_then),
    "other tokens, said to be old": ("tokens", blamed_on_age),
    "weights that did not move": ("weights", missed_move),
    "a norm changed in the rollout": ("weights", changed_norm),
    "packed weights changed in the rollout": ("weights", changed_packed),
    "a layer that computes otherwise": ("layer", changed_computation),
    "temperature forgotten": ("temperature", forgotten_temperature),
    "temperature forgotten, by value": ("temperature", unknown_temperature),
    "top-k forgotten": ("top_k", forgotten_top_k),
    "top-p forgotten": ("top_p", forgotten_top_p),
    "min_new_tokens forgotten": ("min_new_tokens", forgotten_min_new_tokens),
    "an edited prompt": ("prompt", edited_prompt),
    "an edited prompt, the first one gone": ("prompt", replaced_prompt),
    "an edited prompt, by value": ("tokens", other_tokens),
    "text tokenised anew, by value": ("template", read_special_token),
    "a chat template left out, by value": ("template", forgotten_template),
    "a chat template left out": ("template", replaced_template),
    "a chat template too much, by value": ("template", added_template),
    "a first token twice, by value": ("template", doubled_beginning),
    "a prefix cache that outlives an update": ("cache", old_cache),
    "a trainer that computes in bf16": ("dtype", rounding_trainer),
    "a rollout with weights in bf16": ("dtype", rounded_weights),
    "a batch of a rollout in bf16": ("dtype", batch_in_bf16),
}
"""What is planted -> the cause that is to be named, and who plants it."""


# ---- on the ranks


def skip_the_move(rank: Any) -> None:
    """Have the rollout take its weights for new."""
    rank._hosted.transition.stale = False


def bend(rank: Any, times: float) -> None:
    """Change one plain parameter of the rollout, as if it had changed after it had arrived."""
    rank._hosted.rollout._model.model.layers[1].post_attention_layernorm.weight.data.mul_(times)
    rank._hosted.rollout._engine.reset_prefix_cache()
    rank._hosted.transition.stale = False


def bend_packed(rank: Any, times: float) -> None:
    """Change what a packed kernel gives, until weights are packed anew."""
    layer = rank._hosted.rollout._model.model.layers[2].mlp.down_proj
    multiply = layer.cpu_linear
    layer.cpu_linear = lambda x, weight, bias: multiply(x, weight, bias) * times
    rank._hosted.rollout._engine.reset_prefix_cache()
    rank._hosted.transition.stale = False


def bend_computation(rank: Any, times: float) -> None:
    """Change what a layer's attention gives."""
    attention = rank._hosted.rollout._model.model.layers[2].self_attn
    attention.bent = attention.register_forward_hook(lambda module, given, out: out * times)


def pass_in_bf16(rank: Any) -> None:
    """Have the trainer's passes compute in bf16."""
    import torch

    model = rank.module

    def rounded(*arguments: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return type(model).forward(model, *arguments)

    model.forward = rounded


def round_what_arrives(rank: Any) -> None:
    """Have the rollout round what arrives."""
    rollout = rank._hosted.rollout
    finish = rollout.finish_update

    def rounded() -> None:
        for parameter in rollout.readable().values():
            parameter.copy_(parameter.bfloat16().float())
        finish()

    rollout.finish_update = rounded


def bend_what_arrives(rank: Any) -> None:
    """Have the rollout change one of its own copies of what arrives."""
    rollout = rank._hosted.rollout
    finish = rollout.finish_update

    def bent() -> None:
        finish()
        rollout._model.model.layers[1].mlp.down_proj.weight.data.mul_(1.2)

    rollout.finish_update = bent


def keep_the_cache(rank: Any) -> None:
    """Have the rollout keep its prefix cache whatever happens."""
    rank._hosted.rollout._engine.reset_prefix_cache = lambda *given: True


def as_before(rank: Any) -> None:
    """Take away what was planted on a rank."""
    rollout = rank._hosted.rollout
    rank.module.__dict__.pop("forward", None)
    rollout.__dict__.pop("finish_update", None)
    rollout._engine.__dict__.pop("reset_prefix_cache", None)
    attention = rollout._model.model.layers[2].self_attn
    if hasattr(attention, "bent"):
        attention.bent.remove()
        del attention.bent


def mend(actor: Any) -> None:
    """Take away what was planted; the next generation takes the trainer's weights anew."""
    actor.run(as_before)
