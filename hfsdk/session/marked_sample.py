"""The words of a `FirstBad`: its sample as text, the tokens around, a verdict, and the cell that gets it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfsdk.core.batch import Batch
from hfsdk.core.first_bad import FirstBad
from hfsdk.core.table import Ragged

AROUND = 5
"""Tokens shown before and after the token."""
MOST_CHARACTERS = 400
"""Of a sample's text on either side of the token."""


def marked_text(sample: Batch, token: int | None) -> str:
    """Return prompt and response of a batch's only row, with the token between ⟦ and ⟧."""
    prompt = sample.text("prompt")[0] if "prompt" in sample else ""
    tokens = sample["response"]
    assert isinstance(tokens, Ragged)
    response = tokens[0].tolist()
    if token is None or token >= len(response):
        return prompt[-MOST_CHARACTERS:] + sample.text()[0][:MOST_CHARACTERS]
    client = sample._client
    before, at, after = (client.texts([part])[0] for part in (response[:token], response[token : token + 1], response[token + 1 :]))
    if not at:  # a special token, which texts leave out
        at = client.token_texts(response[token : token + 1])[0]
    return f"{(prompt + before)[-MOST_CHARACTERS:]}⟦{at}⟧{after[:MOST_CHARACTERS]}"


def tokens_around(sample: Batch, token: int | None) -> tuple[Mapping[str, Any], ...]:
    """Return the response's tokens around one, or its first ones, with every column per token."""
    frame = sample.to_pandas("tokens").drop(columns="sample")
    first = max(0, (token or 0) - AROUND)
    few = frame.iloc[first : (token or 0) + AROUND + 1]
    return tuple({str(name): value for name, value in row.items()} for row in few.to_dict("records"))


def verdict_of(found: FirstBad, said: str) -> str:
    """Say what was found in a sentence or two."""
    where = f" of sample {found.sample}" if found.sample is not None else ""
    where += f", token {found.token}" if found.token is not None else ""
    number = "" if found.value is None else f" is {found.value:.3g}"
    number += f", {found.usual:.3g} at most otherwise" if found.usual is not None and found.value is not None else ""
    mini = f" in mini-batch {found.mini_batch}" if found.mini_batch is not None else ""
    mini += f" of epoch {found.epoch}" if found.epoch else ""
    layer = f" The output of {found.layer} is the first to be bad." if found.layer else ""
    ranks = f" on rank{'s' * (len(found.ranks) > 1)} {', '.join(map(str, found.ranks))}" if found.ranks else ""
    head = f"Step {found.step}, {found.call}{mini}: "
    if found.kind == "weight" and not found.call:
        return (
            f"The weight {found.parameter} of {found.role}{ranks}{number}, and is finite on the ranks that hold the same. Done "
            f"again from {found.snapshot!r} the steps leave it finite: nothing in them makes it. Look at what ran on the ranks "
            "between two steps, and at the memory of that device."
        )
    if found.kind == "weight":
        met = f" {found.call} meets it first: {found.column}{where}." if found.column else ""
        body = f"the weight {found.parameter}{ranks}{number} ({said}).{met}"
    elif found.kind == "loss":
        what = "the loss" if found.column == "token_loss" else "the loss's gradient by the model's output"
        body = f"{what}{where}{number}; every column that it reads, and what the model says, is finite."
    elif found.kind == "gradient":
        body = f"the gradient of {found.parameter or 'the weights'}{where}{ranks}{number}, and the loss is finite."
    elif found.kind == "update":
        body = f"no sample stands out. {said[:1].upper()}{said[1:]}."
    elif found.value is None:
        body = f"the function raises{where.replace(' of ', ' for ', 1)}: {said}"
    else:
        first = " It is the first bad number: all that was written before it is finite and of its usual size."
        body = f"{found.column}{where}{number}.{first}"
    more = f" {said}." if said and found.kind == "gradient" else ""
    return head + body + layer + more


def weight_code(found: FirstBad) -> str:
    """Return the lines that show a weight's largest number on every rank."""
    look = "lambda rank: float(dict(rank.module.named_parameters())[name].abs().max())"
    return f"name = {found.parameter!r}\nsession.models.{found.role}.run({look})"


def code_of(found: FirstBad, num_good: int) -> str:
    """Return the cell that gets the number again.

    Args:
        found: the rest of it.
        num_good: steps from the snapshot to the bad one.
    """
    lines = [
        "run = session.run",
        f"session.rewind(run.last_good)  # {found.snapshot}: weights, optimizers, prompts and seeds as they were",
        "algorithm, prompts = run.algorithm, run.prompts",
    ]
    step = "algorithm.step(session.models, next(prompts))"
    if num_good == 1:
        lines.append(f"algorithm.metrics({step})  # step {found.step - 1}, bit for bit")
    elif num_good > 1:
        lines += [f"for _ in range({num_good}):  # steps {found.step - num_good} to {found.step - 1}, bit for bit", f"    {step}"]
    if found.kind != "weight":
        lines.append(f"step = {step}  # step {found.step}")
    number = "?" if found.value is None else f"{found.value:.6g}"
    if found.kind == "weight":
        lines += [
            "with contextlib.suppress(hf.HfsdkError):  # what the weight makes fail",
            f"    algorithm.metrics({step})  # step {found.step}",
            weight_code(found),
        ]
        lines[0:0] = ["import contextlib", ""]
    elif found.value is None and found.column:
        lines.append(f"step.batch[{found.column!r}]  # it raises")
    elif found.kind not in ("loss", "gradient", "update"):
        at = f"step.batch.take([{found.sample}])[{found.column!r}]"
        lines.append(f"{at}{'[0]' if found.token is None else f'[0][{found.token}]'}  # {number}")
    else:
        lines.append(f"algorithm.metrics(step)  # {'it raises' if found.symptom.endswith('failed') else found.symptom}")
    return "\n".join(lines)
