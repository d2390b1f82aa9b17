"""Mistakes: the number that tells, means of means, GAE at the end of a response."""

from __future__ import annotations

from hfsdk.teach.exercise_kinds import Choice, Code, Exercise, Number


def _gae(rewards: list[float], values: list[float], gamma: float, lam: float, after: float = 0.0) -> list[float]:
    advantages, later = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else after
        later = rewards[t] + gamma * following - values[t] + gamma * lam * later
        advantages[t] = later
    return advantages


def _bootstrapped(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    return _gae(rewards, values, gamma, lam, after=values[-1])


def _one_step(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    return _gae(rewards, values, gamma, 0.0)


def _returns(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    return [a + v for a, v in zip(_gae(rewards, values, gamma, lam), values, strict=True)]


def _no_gamma(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    return _gae(rewards, values, 1.0, lam)


EXERCISES: dict[str, Exercise] = {
    "08.1": Choice(
        right="rollout gap",
        wrong={
            "|ratio - 1|": "Both of the trainer's passes make the same mistake, so that their ratio is 1.",
            "approx_kl": "It compares the trainer's two passes with each other, and they agree.",
            "clip_fraction": "Nothing is clipped where the ratio is 1.",
        },
        because="only the engine that drew the tokens knows the temperature they were drawn at.",
    ),
    "08.2": Number(
        right=1.8,
        wrong={
            1.5: "That is the mean of the two means: a token of the short micro-batch counts four times as much.",
            3.0: "Losses of tokens are averaged, not added.",
            1.2: "The weights are the wrong way round: eight tokens have the mean 2.",
        },
        otherwise="Add up the losses of all ten tokens, and divide once.",
        because="(2 x 1 + 8 x 2) / 10: one denominator for all, so that the cut into micro-batches does not matter.",
    ),
    "08.3": Code(
        right=_gae,
        cases=(([0.0, 0.0, 1.0], [0.5, 0.4, 0.3], 1.0, 0.95), ([1.0], [0.2], 0.9, 0.5), ([0.0, 1.0], [0.1, 0.7], 0.9, 0.0)),
        wrong=(
            (_bootstrapped, "Behind the last token it expects more to come. A response that ended earns nothing any more."),
            (_returns, "These are the returns, the critic's targets; advantages are that minus the values."),
            (_no_gamma, "gamma is left out: it discounts both the next value and the later advantages."),
            (_one_step, "lambda is not used: later differences do not arrive."),
        ),
        otherwise="Backwards: delta = reward + gamma x next value - value; advantage = delta + gamma x lambda x next advantage.",
        because="backwards, with value and advantage 0 behind the last token.",
    ),
}
