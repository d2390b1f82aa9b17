"""The task of learning.py: continue the first words of a review so that VADER finds it positive. Data and evaluator.

The evaluator is plain transformers and reads folders, so that it judges policies of hfsdk and of TRL alike. For every held-out
prompt it draws continuations at temperature 1 from a fixed seed, and measures, per continuation:

=========  =========================================================================================================
score      VADER's compound score of the continuation alone, special tokens left out, -1 to 1
kl_k1      sum over tokens of log p - log p0 (p the policy, p0 the initial policy): unbiased, noisy
kl_k3      sum over tokens of p0/p - 1 - log(p0/p): unbiased, never negative, heavy tail
kl         sum over tokens of the KL between the two whole distributions at that place: unbiased, least noise
=========  =========================================================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import quiet_transformers

from hfsdk import data

PROMPT_BYTES = 28
"""Prompts are as many whole words as fit into this many bytes (tokens of `tiny`)."""
SHORTEST_PROMPT_BYTES = 12
NEW_TOKENS = 40
NUM_HELD_OUT = 200


def prompt_of(review: str) -> str | None:
    """Return the first words of a review; ``None`` where that is the whole of it or too little."""
    if len(review.encode()) <= PROMPT_BYTES:
        return None
    words = review.split(" ")
    fitting = [" ".join(words[:n]) for n in range(1, len(words)) if len(" ".join(words[:n]).encode()) <= PROMPT_BYTES]
    return fitting[-1] if fitting and len(fitting[-1].encode()) >= SHORTEST_PROMPT_BYTES else None


def train_prompts() -> list[str]:
    """Return the distinct prompts of the train split, shuffled the same way everywhere."""
    return _prompts("train")


def held_out_prompts() -> list[str]:
    """Return 200 distinct prompts of the test split; none is also a prompt of the train split."""
    seen = set(train_prompts())
    return [prompt for prompt in _prompts("test") if prompt not in seen][:NUM_HELD_OUT]


def positive(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward: how positive VADER finds each continuation, without its prompt."""
    from hfsdk.data import vader_sentiment

    return vader_sentiment(list(completions))


def _prompts(split: Any) -> list[str]:
    reviews = data.movie_reviews(split)["text"]
    cut = {prompt for prompt in map(prompt_of, reviews) if prompt}
    return sorted(cut, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())


@dataclass(frozen=True)
class Judgement:
    """What a policy's continuations of the held-out prompts are worth: means over continuations."""

    score: float
    kl: float
    kl_k1: float
    kl_k3: float
    tokens: float
    ended: float
    """Share that ended by themselves."""
    score_error: float
    """Standard error of ``score``, over prompts."""
    samples: list[tuple[str, str, float]]
    """(prompt, continuation, score) of the first prompts."""


class Evaluator:
    """Judges policies against the initial one. ``copies`` continuations per prompt, the same random numbers every time."""

    new_tokens = NEW_TOKENS

    def __init__(self, initial: str | Path, prompts: Sequence[str], *, copies: int = 2, seed: int = 1234) -> None:
        from transformers import AutoTokenizer

        quiet_transformers()
        self.prompts, self.copies, self.seed = list(prompts), copies, seed
        self.tokenizer = AutoTokenizer.from_pretrained(initial, padding_side="left")
        self._initial = self._load(initial)

    @staticmethod
    def _load(folder: str | Path) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, folder: str | Path, num_samples: int = 3) -> Judgement:
        """Judge the policy in a folder."""
        import torch

        policy = self._load(folder)
        rows = [prompt for prompt in self.prompts for _ in range(self.copies)]
        texts, measured = [], []
        torch.manual_seed(self.seed)
        for start in range(0, len(rows), 100):
            some, numbers = self._draw(policy, rows[start : start + 100])
            texts += some
            measured.append(numbers)
        kl, k1, k3, tokens, ended = np.concatenate(measured, axis=1)
        scores = np.array(self.score(rows, texts))
        by_prompt = scores.reshape(-1, self.copies).mean(axis=1)
        shown = range(0, num_samples * self.copies, self.copies)
        return Judgement(
            score=float(scores.mean()), kl=float(kl.mean()), kl_k1=float(k1.mean()), kl_k3=float(k3.mean()),
            tokens=float(tokens.mean()), ended=float(ended.mean()),
            score_error=float(by_prompt.std(ddof=1) / np.sqrt(len(by_prompt))),
            samples=[(rows[i], texts[i], float(scores[i])) for i in shown],
        )  # fmt: skip

    def score(self, prompts: list[str], continuations: list[str]) -> list[float]:
        """Score each continuation; for another task in a subclass."""
        return data.vader_sentiment(continuations)

    def _draw(self, policy: Any, prompts: list[str]) -> tuple[list[str], np.ndarray[Any, Any]]:
        """Return continuations and, for each, (kl, k1, k3, tokens, ended)."""
        import torch

        given = self.tokenizer(prompts, return_tensors="pt", padding=True)
        width = given["input_ids"].shape[1]
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        with torch.no_grad():
            tokens_BS = policy.generate(
                **given, max_new_tokens=self.new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=eos,
                pad_token_id=pad,
            )  # fmt: skip
            response_BT = tokens_BS[:, width:]
            after_eos_BT = (response_BT == eos).cumsum(1) - (response_BT == eos).long() > 0
            mask_BT = ~after_eos_BT
            log_p_BTV = self._log_probs(policy, given, tokens_BS)
            log_p0_BTV = self._log_probs(self._initial, given, tokens_BS)
            chosen = response_BT[..., None]
            log_ratio_BT = (log_p_BTV.gather(-1, chosen) - log_p0_BTV.gather(-1, chosen))[..., 0]
            exact_BT = (log_p_BTV.exp() * (log_p_BTV - log_p0_BTV)).sum(-1)
            k3_BT = torch.expm1(-log_ratio_BT) + log_ratio_BT
            sums = [(x * mask_BT).sum(1) for x in (exact_BT, log_ratio_BT, k3_BT)]
        ended_B = (response_BT == eos).any(1)
        numbers = torch.stack([*sums, mask_BT.sum(1).float(), ended_B.float()]).double().numpy()
        ids = [row[keep].tolist() for row, keep in zip(response_BT, mask_BT, strict=True)]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids], numbers

    @staticmethod
    def _log_probs(model: Any, given: Any, tokens_BS: Any) -> Any:
        import torch

        width = given["input_ids"].shape[1]
        ones = torch.ones_like(tokens_BS[:, width:])  # what follows an end is not counted and cannot be seen from before it
        attention = torch.cat([given["attention_mask"], ones], dim=1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=tokens_BS, attention_mask=attention, position_ids=positions).logits
        return logits[:, width - 1 : -1].float().log_softmax(-1)
