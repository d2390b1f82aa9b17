"""Rewards: functions of several tasks, async ones, forms of scores, and what a probe shows of them."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import torch

import hfsdk as hf
from hfsdk.algorithms.filtering import informative_rows
from hfsdk.core.table import Table
from tests.strangers.frame import Bench, Case, Refused

TASKS = {"prompt": ["1+1=", "def f"], "task": ["math", "code"]}


def maths(completions, task):
    return [1.0 if one == "math" else None for one in task]


def code(completions, task):
    return [2.0 if one == "code" else None for one in task]


def neither(completions):
    return [None] * len(completions)


async def judged(completions, **columns):
    return await asyncio.gather(*(asyncio.sleep(0, float(len(text))) for text in completions))


class Judge:
    """An object whose call is async."""

    async def __call__(self, prompts, completions):
        return [0.5] * len(completions)


def scored(it: Bench, reward, data=TASKS, n=2, **options):
    """Return the scores of ``n`` responses to each prompt."""
    session = it.session_of("tiny")
    handle = session.reward(reward, **options)
    prompts = session.prompts(data, column="prompt", batch_size=len(data["prompt"]), shuffle=False)
    batch = session.models.actor.generate(prompts[0], max_new_tokens=4, n=n)
    return [round(float(score), 6) for score in handle.compute_scores(batch)["scores"]]


def nansum(_: Bench):
    """What TRL makes of the same lists: ``(rewards_per_func * weights).nansum(dim=1)``."""
    each = torch.tensor([[1.0, torch.nan], [1.0, torch.nan], [torch.nan, 2.0], [torch.nan, 2.0]])
    return (each * torch.tensor([1.0, 0.5])).nansum(dim=1).tolist()


def advantages(it: Bench, reward):
    """Return the advantages of two responses."""
    session = it.session_of("tiny")
    batch = session.reward(reward).compute_scores(session.models.actor.generate(["a"], n=2))
    return hf.GRPO(n=2, max_new_tokens=4, kl_coef=0.0).with_advantages(batch)["advantages"]


def trained(it: Bench):
    """Return the numbers of a step that two functions reward."""
    session = it.session()
    session.actor("tiny", optimizer=hf.AdamW(lr=1e-5))
    session.reward([maths, code], weights=[1.0, 0.5])
    prompts = session.prompts(TASKS, column="prompt", batch_size=2, shuffle=False)
    run = session.train(hf.GRPO(n=2, max_new_tokens=4, kl_coef=0.0), prompts, steps=1, progress=False)
    row = run.history.iloc[-1]
    return [row["score_mean"], row["score_mean_of_reward.maths"], row["score_mean_of_reward.code"], "not_scored" in row]


def probed(it: Bench):
    """Return the completions that a probe shows of texts in which a special token is written out."""
    folder = it.model(tokenizer=with_end)
    session = it.session_of(folder)
    given = []

    def reward(prompts, completions):
        given.extend(completions)
        return [0.0] * len(completions)

    handle = session.reward(reward)
    return list(handle.probe(["four<|end|>"], prompts=["2+2="]).completions)


def of_contents(completions, **columns):
    return [float(len(one[0]["content"])) for one in completions]


def kept(_: Bench, *groups: list[float]) -> list[int]:
    """Return the groups that dynamic sampling keeps of these scores."""
    scores = np.array(groups, np.float32)
    table = Table({"scores": scores.ravel(), "group": np.repeat(np.arange(len(groups)), scores.shape[1])})
    return sorted({row // scores.shape[1] for row in informative_rows(table)})


def with_end(content):
    content["added_tokens"].append({
        "id": 259, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    })  # fmt: skip


CASES = [
    Case(
        "two functions, each None for the other's rows", "trl PR#3079, ms-swift#8123",
        lambda it: scored(it, [maths, code], weights=[1.0, 0.5]), nansum, "TRL's sum over reward functions, by torch",
    ),
    Case(
        "a step of them", "trl PR#3079", trained, [1.0, 1.0, 2.0, False], "means over the rows that each function scores",
    ),
    Case(
        "None for every row by every function", "trl PR#3079",
        lambda it: advantages(it, [neither, neither]),
        Refused(hf.HfsdkError, "2 samples", "None", "every part", "reward.probe(batch)"), "there is nothing to learn from",
    ),
    Case(
        "an async function", "kin of trl#6533 (TRL awaits it)",
        lambda it: scored(it, judged, n=1), [4.0, 4.0], "each response is hhhh, four characters",
    ),
    Case(
        "an object whose call is async", "kin of trl#6533", lambda it: scored(it, Judge(), n=1), [0.5, 0.5], "what it returns",
    ),
    Case(
        "a partial of an async function", "kin of trl#6533",
        lambda it: scored(it, functools.partial(judged, task=None), n=1), [4.0, 4.0], "as the function itself",
    ),
    Case(
        "a sum with an async function", "kin of trl#6533",
        lambda it: scored(it, [judged, maths], n=1), [5.0, 4.0], "4 characters, and 1 for the row of maths",
    ),
    Case(
        "a list of 0-d tensors", "trl#6533",
        lambda it: scored(it, lambda completions: [torch.tensor(0.25) for _ in completions], n=1), [0.25, 0.25], "TRL takes it",
    ),
    Case(
        "an array of 0-d arrays", "kin of trl#6533",
        lambda it: scored(it, lambda completions: [np.array(0.25) for _ in completions], n=1), [0.25, 0.25], "one number each",
    ),
    Case(
        "GRPO from a base model with stop strings", "trl#2820, maxtext#3263", lambda it: hf.GRPO(stop=["\n"]),
        Refused(hf.OptionError, "'stop'", "models.actor.generate(prompts, stop=", "eos_token_id"), "actor.generate takes it",
    ),
    Case(
        "GRPO with stop token ids", "maxtext#3263", lambda it: hf.GRPO(stop_token_ids=[1]),
        Refused(hf.OptionError, "'stop_token_ids'", "stop_token_ids=[13]"), "actor.generate takes them",
    ),
    Case(
        "GRPO with min_p", "kin of trl#2820 (TRL has min_p)", lambda it: hf.GRPO(min_p=0.1),
        Refused(hf.OptionError, "'min_p'", "there is none", "top_k, top_p"), "no argument of actor.generate is one",
    ),
    Case(
        "a call of generate with a repetition penalty", "kin of trl#2820",
        lambda it: it.session_of("tiny").models.actor.generate(["a"], repetition_penalty=1.1),
        Refused(hf.HfsdkError, "'repetition_penalty'", "there is none"), "no argument of actor.generate is one",
    ),
    Case(
        "a function for messages, as TRL gives them of conversations", "trl#4202, unsloth#2907",
        lambda it: scored(it, of_contents, data={"prompt": [[{"role": "user", "content": "Hi"}]]}),
        Refused(hf.HfsdkError, "of_contents", "TypeError", "completions are texts"), "completions are texts here, always",
    ),
    Case(
        "groups of equal scores that are neither 0 nor 1", "OpenRLHF#1270",
        lambda it: kept(it, [0.5] * 3, [0.1 + 0.2] * 3, [0.0, 0.5, 1.0], [1 / 3] * 3, [0.95, 0.95, 0.0]), [2, 4],
        "arXiv 2503.14476: a group without spread has no advantage, whatever its mean",
    ),
    Case(
        "a probe of texts with a special token in them", "kin of trl#5352", probed, ["four"],
        "a reward function is given texts without special tokens",
    ),
]  # fmt: skip
