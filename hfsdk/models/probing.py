"""What ``reward.probe`` is given and gets: samples as a batch with their texts, and a model's scores as outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hfsdk.core.batch import Batch
from hfsdk.core.builtin import SEQUENCES
from hfsdk.core.checks import shown
from hfsdk.core.errors import ColumnError, OptionError
from hfsdk.core.sample_outcome import SampleOutcome
from hfsdk.core.table import Ragged
from hfsdk.models.host import CallClient


def samples_of(
    client: CallClient, samples: Any, prompts: Any, columns: Mapping[str, Any]
) -> tuple[Batch, tuple[list[str], list[str]]]:
    """Return samples as a batch, and the texts of prompts and completions as a function is given them: read back from their tokens.

    Raises: as :meth:`hfsdk.models.reward.RewardModel.probe`.
    """
    if isinstance(samples, Batch):
        if prompts is not None or columns:
            given = ", ".join(["prompts"] * (prompts is not None) + list(columns))
            raise OptionError(f"{given} go with completions given as texts; a batch has its own: batch.with_columns(name=[...])")
        samples.need(SEQUENCES, "probe")
        return samples, (samples.text("prompt"), samples.text("response"))
    completions = _texts(samples, "samples must be a batch, or a list of completions as texts")
    asked = [""] * len(completions) if prompts is None else _texts(prompts, "prompts must be a list of texts, one per completion")
    if len(asked) != len(completions):
        raise ColumnError(f"there are {len(asked)} prompts for {len(completions)} completions; give one each")
    encode = client.need_tokenizer().encode
    tokens = {
        name: Ragged.of([encode(text) if text else [] for text in texts], "int32")
        for name, texts in zip(SEQUENCES, (asked, completions), strict=True)
    }
    batch = Batch.from_columns(client, {**tokens, **columns})
    return batch, (batch.text("prompt"), batch.text("response"))


def scored_by_model(score: float) -> SampleOutcome:
    """Return what a model's score is as an outcome; of another than a finite one, a failure."""
    if math.isfinite(score):
        return SampleOutcome(score=score)
    return SampleOutcome(failure="is no score", message=f"the model's score is {score}")


def _texts(given: Any, wanted: str) -> list[str]:
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if not listed or not all(isinstance(text, str) for text in listed):
        raise OptionError(f"{wanted}; got {shown(given)}")
    return listed
