"""The batch arithmetic of a step: from prompts to optimizer steps and tokens, one formula a row.

::

    prompts x responses each = samples --+-- mini-batch: samples of one optimizer step, all ranks
                                         |      / dp: the same on one rank
                                         |         / micro-batch: passes whose gradients are added up
                                         `-- samples / mini-batch x epochs = optimizer steps of the iteration
"""

from __future__ import annotations

import math

from hfsdk.configs.step_config import ArithmeticRow, StepConfig, number_text

ROUNDED = {
    "down": "rounded down: the rest is not trained on", "up": "rounded up: the last mini-batch is filled up or smaller",
    "carried": "gradients go on adding up over generations",
}  # fmt: skip


def batch_rows(step: StepConfig) -> tuple[ArithmeticRow, ...]:
    """Return the table's rows, in the order of the drawing above."""
    how = step.how
    per_rank = step.mini_batch / step.dp
    steps = step.counted / step.mini_batch
    rows = [
        ArithmeticRow(name="prompts", value=step.counted / step.copies if step.said_samples else step.prompts, how=how["prompts"]),
        ArithmeticRow(name="responses per prompt", value=step.copies, how=how["responses per prompt"]),
        ArithmeticRow(
            name="samples", value=step.counted, how=how.get("samples", f"{step.prompts:,} prompts x {step.copies} responses")
        ),
        ArithmeticRow(name="mini-batch", value=step.mini_batch, how=how["mini-batch"]),
        ArithmeticRow(name="data-parallel ranks", value=step.dp, how=how["data-parallel ranks"]),
        ArithmeticRow(name="mini-batch per rank", value=per_rank, how=f"{step.mini_batch:,} samples / {step.dp} ranks"),
        *_micro_rows(step, per_rank),
        ArithmeticRow(name="epochs", value=step.epochs, how=how["epochs"]),
        ArithmeticRow(
            name="optimizer steps", value=_whole_steps(step), how=f"{step.counted:,} samples / {step.mini_batch:,} x {step.epochs}"
            + ("" if steps.is_integer() else f", {ROUNDED[step.rounding]}"),
        ),
        ArithmeticRow(
            name="tokens of a sample", value=step.sample_tokens,
            how=how.get("tokens of a sample", f"at most {step.prompt_tokens:,} prompt + {step.response_tokens:,} response"),
        ),
        ArithmeticRow(
            name="tokens generated", value=step.counted * step.response_tokens,
            how=f"at most {step.counted:,} samples x {step.response_tokens:,}",
        ),
        ArithmeticRow(
            name="tokens trained on", value=step.counted * step.sample_tokens * step.epochs,
            how=f"at most {step.counted:,} samples x {step.sample_tokens:,} x {step.epochs}, each pass over them",
        ),
    ]  # fmt: skip
    return tuple(rows)


def _micro_rows(step: StepConfig, per_rank: float) -> list[ArithmeticRow]:
    if step.micro_batch is not None:
        return [
            ArithmeticRow(name="micro-batch per rank", value=step.micro_batch, how=step.how["micro-batch per rank"]),
            ArithmeticRow(
                name="gradient accumulation", value=per_rank / step.micro_batch,
                how=f"{number_text(per_rank)} samples / {step.micro_batch} a micro-batch",
            ),
        ]  # fmt: skip
    if step.micro_tokens is None:
        return [
            ArithmeticRow(name="micro-batch per rank", value=None, how=step.how["micro-batch per rank"]),
            ArithmeticRow(name="gradient accumulation", value=None, how="no micro-batch is said"),
        ]
    most = accumulated_at_most(step)
    return [
        ArithmeticRow(name="micro-batch tokens per rank", value=step.micro_tokens, how=step.how["micro-batch per rank"]),
        ArithmeticRow(
            name="gradient accumulation", value=most,
            how=f"at most: {number_text(math.ceil(per_rank))} longest samples of {step.sample_tokens:,} tokens, "
            f"{max(1, step.micro_tokens // step.sample_tokens)} in {step.micro_tokens:,}; fewer where samples are shorter",
        ),
    ]  # fmt: skip


def accumulated_at_most(step: StepConfig) -> int:
    """Return the passes of one mini-batch on one rank where all samples are as long as they may be."""
    assert step.micro_tokens is not None
    return math.ceil(step.mini_batch / step.dp / max(1, step.micro_tokens // step.sample_tokens))


def mini_batches(step: StepConfig) -> int:
    """Return the optimizer steps of one epoch, at least one."""
    steps = step.samples / step.mini_batch
    return max(1, math.ceil(steps) if step.rounding == "up" else math.floor(steps))


def _whole_steps(step: StepConfig) -> float:
    steps = step.counted / step.mini_batch
    whole = {"up": math.ceil(steps), "down": math.floor(steps), "carried": steps}[step.rounding]
    return whole * step.epochs
