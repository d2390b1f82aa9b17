"""The algorithms once more, as loops over Python's numbers: written from the papers, for `test_option_effects.py` to compare with.

Nothing here is imported from hfsdk. An algorithm is its name (`hf.GRPO` is "GRPO") and its options, a dict; a sample is a `Sample`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

PROMPTS = 6
ALIKE = (2, 4)
"""Prompts whose responses all have the same score."""
LONGEST = 32
GREEDY = 99
"""Place of a prompt's greedy response."""
MULTIPLIER = 0.7
FAR = 20.0
"""Where log-ratios are cut."""


def single(values):
    """Round to float32, as columns are."""
    return np.asarray(values, np.float32).astype(float).tolist()


def single_of(numbers):
    return dict(zip(numbers, single([*numbers.values()]), strict=True))


@dataclass(frozen=True)
class Sample:
    """A response to a prompt and what every model says of its tokens."""

    number: int
    place: int
    response: list[int]
    ended: bool
    rollout: list[float]
    old: list[float]
    ref: list[float]
    new: list[float]
    entropy: list[float]
    values: list[float]
    new_values: list[float]
    cost_values: list[float]
    new_cost_values: list[float]
    token_scores: list[float]
    score: float
    cost: float

    @property
    def key(self):
        return 1000 * self.number + self.place

    @property
    def parts(self):
        """Scores of two rewards, of one prompt all the same."""
        return single_of({"exact": float(self.score > 0), "brief": 0.0 if self.number in ALIKE else math.sin(self.key)})

    def __len__(self):
        return len(self.response)


@functools.cache
def sample(number, place, longest=LONGEST, *, per_token=False, far=False):
    """Make up a sample by its prompt and its place among the prompt's responses; ``far``: the policy has moved by e^20 and more."""
    rng = np.random.default_rng([number, place])
    length = 0 if (number, place) == (0, 1) else int(rng.integers(1, 7))
    tokens = rng.integers(1, 9, 7)
    old = -rng.exponential(1.0, 7) - 0.05
    shift = rng.normal(0, 0.5) + rng.normal(0, 0.5, 7)
    if far:
        shift = np.full(7, (22.0, -30.0, 0.1)[(number + place) % 3])
    rollout, ref = old + rng.normal(0, 0.4, 7), old + rng.normal(0, 0.5, 7)
    values, cost_values = rng.normal(0, 1, 7), rng.normal(0, 1, 7)
    moved, cost_moved = values + rng.normal(0, 0.4, 7), cost_values + rng.normal(0, 0.4, 7)
    entropy, token_scores, score, cost = rng.uniform(0, 2, 7), rng.normal(0, 1, 7), rng.normal(0, 1.5), rng.normal(0, 1)
    cut = min(length, longest)
    if number in ALIKE:
        score, token_scores = 0.5, np.zeros(7)
    columns = (rollout, old, ref, old + shift, entropy, values, moved, cost_values, cost_moved, token_scores)
    columns = [single(column[:cut]) for column in columns]
    score = sum(columns[-1]) if per_token else round(2 * score) / 2
    return Sample(number, place, tokens[:cut].tolist(), place % 3 != 0 and cut == length, *columns, *single([score, cost]))


# -- the divergence, rewards, advantages


def kl(kind, policy, reference, clamp="above", still=None):
    """Estimate KL(policy || reference) of a token (Schulman's note); ``still`` is the policy where no gradient flows."""
    apart = reference - policy
    if kind == "k1":
        return -apart
    if kind == "abs":
        return abs(apart)
    if kind == "k2":
        return apart**2 / 2
    if kind in ("k1+", "k3+"):
        still = policy if still is None else still
        return kl(kind[:2], still, reference, clamp) + kl("k2", policy, reference) - kl("k2", still, reference)
    apart = cut(apart, clamp)
    value = math.exp(apart) - 1 - apart
    return min(value, 10.0) if clamp == "both" else value


def cut(log_ratio, clamp):
    if clamp == "none":
        return log_ratio
    return min(max(log_ratio, -FAR), FAR) if clamp == "both" else min(log_ratio, FAR)


def clipped(score, o):
    most = o.get("score_clip")
    return score if most is None else min(max(score, -most), most)


def mean(numbers):
    return sum(numbers) / len(numbers)


def variance(numbers):
    return sum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1) if len(numbers) > 1 else 0.0


def whitened(rows, keep_mean=False):
    every = [x for row in rows for x in row]
    middle, scale = mean(every), math.sqrt(variance(every) + 1e-8)
    return [[(x - middle) / scale + (middle if keep_mean else 0.0) for x in row] for row in rows]


def to_go(rewards, gamma):
    """Return what is still earned from each token on."""
    return [sum(gamma ** (later - now) * rewards[later] for later in range(now, len(rewards))) for now in range(len(rewards))]


def gae(rewards, values, gamma, lam):
    """GAE eq. 16, as the sum of discounted errors."""
    after = [*values[1:], 0.0][: len(values)]
    errors = [r + gamma * b - v for r, b, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (j - i) * errors[j] for j in range(i, len(errors))) for i in range(len(errors))]


def kl_of(o, samples):
    """Return the estimate per token and the column ``kl``, both by row; without a weight nothing."""
    if not o["kl_coef"]:
        return [[0.0] * len(s) for s in samples], {}
    estimate = [[kl(o["kl"], a, b) for a, b in zip(old_of(s, o), s.ref, strict=True)] for s in samples]
    return estimate, {"kl": [[a - b for a, b in zip(old_of(s, o), s.ref, strict=True)] for s in samples]}


def old_of(s, o):
    return s.rollout if o.get("old_log_probs") == "rollout" else s.old


def rewards_of(scores, divergences, coef, o, per_token=None):
    """InstructGPT eq. 2: minus beta times the KL on each token, the score (or each token's own) on top."""
    rows = []
    for i, (score, row) in enumerate(zip(scores, divergences, strict=True)):
        rewards = [-coef * x for x in row]
        if per_token is not None:
            rewards = [r + clipped(x, o) for r, x in zip(rewards, per_token[i], strict=True)]
        elif rewards:
            rewards[-1] += clipped(score, o)
        rows.append(rewards)
    return rows


def in_groups(samples):
    groups = defaultdict(list)
    for i, s in enumerate(samples):
        groups[s.number].append(i)
    return groups


def spread(scores, low, high):
    """The best corner of GRPOVI's feasible set, of all there are: ends, and at most one value between (arXiv 2505.23247)."""
    counts = sorted(Counter(scores).items())
    best = None
    for top in range(len(counts) + 1):
        for bottom in range(len(counts) - top + 1):
            between = counts[bottom : len(counts) - top]
            up, down = sum(c for _, c in counts[len(counts) - top :]), sum(c for _, c in counts[:bottom])
            rest = sum(scores) - high * up - low * down
            size = sum(c for _, c in between)
            value = rest / size if size else low
            if (abs(rest) > 1e-9 and not size) or not low - 1e-9 <= value <= high + 1e-9:
                continue
            new = [low] * bottom + [value] * len(between) + [high] * top
            square = sum(c * x**2 for x, (_, c) in zip(new, counts, strict=True))
            if best is None or square > best[0] + 1e-12:
                best = square, dict(zip([x for x, _ in counts], new, strict=True))
    return [best[1][x] for x in scores]


def compared(scores, groups, o):
    """GRPO, section 4.1.2: by how many deviations of its group each score is above the group's mean."""
    scores = list(scores)
    low, high = min(scores), max(scores)
    found = [0.0] * len(scores)
    for members in groups.values():
        mine = [scores[i] for i in members]
        if o["increase_variance"] and len(set(mine)) > 1:
            for i, new in zip(members, spread(mine, low, high), strict=True):
                scores[i] = new
    for members in groups.values():
        mine = [scores[i] for i in members]
        middle = mean(mine)
        if len(mine) == 1 and o.get("alone") == "score":
            middle = 0.0
        deviation = {
            "group": math.sqrt(variance(mine)) if len(mine) > 1 else 1.0, "batch": math.sqrt(variance(scores)), "none": None,
        }[o["scale"]]  # fmt: skip
        for i in members:
            alike = len(set(mine)) == 1 and not (len(mine) == 1 and o.get("alone") == "score")
            above = 0.0 if alike else scores[i] - middle
            found[i] = above if deviation is None else above / (deviation + o["epsilon"])
    return found


def in_a_group(name, o, samples, groups):
    """Return what GRPO and its variants compare within a group, by response."""
    scores = [s.score for s in samples]
    if name == "GDPO":
        return of_parts(o, samples, groups)
    if name == "PassAtKTraining":
        return of_subsets(scores, groups, o)
    found = compared(scores, groups, o)
    if name == "GPG":  # the responses of all groups, over those of groups that differ (arXiv 2504.02546)
        taught = sum(len(members) for members in groups.values() if any(found[i] for i in members))
        found = [x * len(found) / max(1, taught) for x in found]
    return found


def of_parts(o, samples, groups):
    """GDPO: each reward compared by itself, weighed and summed, and the sums normalised over the batch (arXiv 2601.05242)."""
    names = o["parts"] or ("score",)
    total = [0.0] * len(samples)
    for name, weight in zip(names, o["weights"] or [1.0] * len(names), strict=True):
        numbers = [s.score if name == "score" else s.parts[name] for s in samples]
        total = [a + weight * b for a, b in zip(total, compared(numbers, groups, o), strict=True)]
    centred = [x - mean(total) for x in total]
    centred = [x if abs(x) > 1e-12 else 0.0 for x in centred]  # the mean of deviations from means, but for rounding
    return [x / (math.sqrt(variance(total)) + o["epsilon"]) for x in centred]


def of_subsets(scores, groups, o):
    """Pass@k training without its closed form: of all subsets of k, how much better those with a response do (arXiv 2508.10751)."""
    found = [0.0] * len(scores)
    for members in groups.values():
        k = min(o["k"], len(members))
        subsets = [(who, float(any(scores[i] >= o["pass_score"] for i in who))) for who in itertools.combinations(members, k)]
        rewards = [reward for _, reward in subsets]
        sigma = math.sqrt(mean([(reward - mean(rewards)) ** 2 for reward in rewards])) + o["epsilon"]
        for i in members:
            found[i] = mean([reward for who, reward in subsets if i in who]) - mean(rewards)
            found[i] /= sigma if o["scale"] == "group" else 1.0
            if len(members) == 1 and o.get("alone") == "score":
                found[i] = scores[i]
    return found


def pass_at_k(samples, k, pass_score):
    """Pass@k by all subsets of each prompt's responses (arXiv 2107.03374)."""
    shares = []
    for members in in_groups(samples).values():
        subsets = itertools.combinations(members, k)
        shares.append(mean([float(any(samples[i].score >= pass_score for i in who)) for who in subsets]))
    return mean(shares)


def on_tokens(numbers, samples):
    return [[x] * len(s) for x, s in zip(numbers, samples, strict=True)]


def advantages(name, o, samples, *, greedy=None, per_token=False, multiplier=MULTIPLIER):
    """Return the columns that the algorithm writes, by row."""
    groups, scores = in_groups(samples), [s.score for s in samples]
    if name == "SafeRLHF":
        return of_costs(o, samples, multiplier)
    if name == "Distillation":
        divergences, columns = kl_of(o, samples)
        rewards = [[-o["kl_coef"] * x for x in row] for row in divergences]
        return columns | {"rewards": rewards, "advantages": [to_go(row, o["gamma"]) for row in rewards]}
    if name == "ProcessGRPO":
        return {"advantages": of_steps(o, samples)}
    if name in GROUPED:
        return {"advantages": on_tokens(in_a_group(name, o, samples, groups), samples)}
    if name == "ReinforcePlusPlusBaseline":
        scores = over_means(o, samples)
    divergences, columns = kl_of(o, samples)
    own = [s.token_scores for s in samples] if per_token and name in ("PPO", "ReinforcePlusPlus") else None
    if name in ("ReinforcePlusPlus", "ReinforcePlusPlusBaseline"):
        rewards = rewards_of(scores, divergences, o["kl_coef"], o, own)
        returns = [to_go(row, o["gamma"]) for row in rewards]
        return columns | {"rewards": rewards, "returns": returns, "advantages": whitened(returns)}
    if name == "ReMax":
        scores = [score - greedy[s.number] for score, s in zip(scores, samples, strict=True)]
        rewards = rewards_of(scores, divergences, o["kl_coef"], o)
        return columns | {"rewards": rewards, "advantages": [to_go(row, 1.0) for row in rewards]}
    if name in ("RLOO", "OPO"):
        whole = [clipped(x, o) - o["kl_coef"] * sum(row) for x, row in zip(scores, divergences, strict=True)]
        return columns | {"advantages": on_tokens(over_baseline(name, o, whole, samples), samples)}
    assert name == "PPO"
    rewards = rewards_of(scores, divergences, o["kl_coef"], o, own)
    for s, row in zip(samples, rewards, strict=True):
        if row and not s.ended:
            row[-1] -= o["missing_eos_penalty"]
    rewards = whitened(rewards, keep_mean=True) if o["whiten_rewards"] else rewards
    raw = [gae(row, s.values, o["gamma"], o["lam"]) for row, s in zip(rewards, samples, strict=True)]
    returns = [[a + v for a, v in zip(row, s.values, strict=True)] for row, s in zip(raw, samples, strict=True)]
    return columns | {"rewards": rewards, "returns": returns, "advantages": whitened(raw) if o["whiten"] else raw}


def of_costs(o, samples, multiplier):
    """Safe-RLHF, appendix B.3: half of the KL lowers the reward, half raises the cost; both advantages are mixed by lambda."""
    divergences, columns = kl_of(o, samples)
    sides = {}
    for side, numbers, values, sign in (
        ("reward", [s.score for s in samples], [s.values for s in samples], 1),
        ("cost", [s.cost for s in samples], [s.cost_values for s in samples], -1),
    ):
        rewards = rewards_of(numbers, divergences, sign * o["kl_coef"] / 2, o)
        raw = [gae(row, v, o["gamma"], o["lam"]) for row, v in zip(rewards, values, strict=True)]
        sides[side] = rewards, raw, [[a + b for a, b in zip(*both, strict=True)] for both in zip(raw, values, strict=True)]
    mixed = [[(a - multiplier * c) / (1 + multiplier) for a, c in zip(*both, strict=True)]
             for both in zip(sides["reward"][1], sides["cost"][1], strict=True)]  # fmt: skip
    return columns | {
        "rewards": sides["reward"][0], "returns": sides["reward"][2], "token_costs": sides["cost"][0],
        "cost_advantages": sides["cost"][1], "cost_returns": sides["cost"][2],
        "advantages": whitened(mixed) if o["whiten"] else mixed,
    }  # fmt: skip


def over_means(o, samples):
    """Return each score minus its group's mean; 0 is that of a group of one with ``alone="score"``."""
    found = [s.score for s in samples]
    for members in in_groups(samples).values():
        middle = 0.0 if len(members) == 1 and o.get("alone") == "score" else mean([samples[i].score for i in members])
        for i in members:
            found[i] -= middle
    return found


def over_baseline(name, o, whole, samples):
    """RLOO: the mean of the others. OPO: the group's mean weighed by length (section 3.2)."""
    found = [0.0] * len(whole)
    for members in in_groups(samples).values():
        mine = [whole[i] for i in members]
        for i in members:
            others = [whole[j] for j in members if j != i]
            if not others:
                found[i] = whole[i] if o.get("alone") == "score" else 0.0
            elif len(set(mine)) == 1:
                found[i] = 0.0
            elif name == "RLOO":
                found[i] = whole[i] - mean(others)
            else:
                tokens = sum(len(samples[j]) for j in members)
                found[i] = whole[i] - sum(len(samples[j]) * whole[j] for j in members) / tokens
    return found


def of_steps(o, samples):
    """GRPO with process supervision, section 4.1.3: rewards of steps, compared over all of a group's, summed from each step on."""
    steps, groups = [], defaultdict(list)
    for i, s in enumerate(samples):
        start = 0
        for t, token in enumerate(s.response):
            if token in o["step_ends"] or t == len(s) - 1:
                groups[s.number].append(len(steps))
                steps.append((i, t, sum(s.token_scores[start : t + 1])))
                start = t + 1
    earned = [[0.0] * len(s) for s in samples]
    for (i, t, _), x in zip(steps, compared([x for *_, x in steps], groups, o), strict=True):
        earned[i][t] = x
    return [to_go(row, 1.0) for row in earned]


# -- losses


@dataclass(frozen=True)
class Token:
    """A token as a loss of the policy sees it."""

    old: float
    rollout: float
    ref: float
    new: float
    entropy: float
    advantage: float
    response_log_ratio: float
    """Mean of ``log pi - log pi_old`` over the response (GSPO)."""
    response_weight: float
    """Sum of ``log pi_old - log pi_rollout`` over the response."""
    response_tokens: int
    response_clipped: float
    """Mean over the response of the log-ratios as GMPO clips them."""
    marked: float = 0.0
    normaliser: float = 1.0
    """What the batch's weights are divided by."""


def tokens_of(samples, o, columns):
    made = []
    for i, s in enumerate(samples):
        old = old_of(s, o)
        moved = [a - b for a, b in zip(s.new, old, strict=True)]
        weight = sum(a - b for a, b in zip(old, s.rollout, strict=True))
        for t in range(len(s)):
            marked = columns["covariance_mask"][i][t] if "covariance_mask" in columns else 0.0
            given = columns["advantages"][i]
            bounded = [one_sided(m, a, o) for m, a in zip(moved, given, strict=True)]
            made.append(Token(old[t], s.rollout[t], s.ref[t], s.new[t], s.entropy[t], given[t], mean(moved), weight, len(s),
                              mean(bounded), marked))  # fmt: skip
    if not o.get("tis_normalise"):
        return made
    each = [trust(o, token)[0] for token in made]
    if o["tis_level"] != "token":  # of responses, each once
        starts = [sum(len(s) for s in samples[:i]) for i, s in enumerate(samples) if len(s)]
        each = [each[i] for i in starts]
    return [dataclasses.replace(token, normaliser=mean(each)) for token in made]


def one_sided(log_ratio, advantage, o):
    """GMPO: a log-ratio is clipped on the side to which the advantage pushes it (arXiv 2507.20673)."""
    if advantage > 0:
        return min(log_ratio, o["clip"] if o["clip_high"] is None else o["clip_high"])
    return max(log_ratio, -o["clip"])


def binary_divergence(kind, log_prob, old_log_prob):
    """DPPO: total variation, or KL, of the distributions over "this token" and "another" (arXiv 2602.04879)."""
    p, q = math.exp(min(log_prob, 0.0)), math.exp(min(old_log_prob, 0.0))
    if kind == "tv":
        return abs(p - q)
    return math.inf if p == 1 else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def surrogate(name, o, at, token):
    """Return the loss of a token at log-probability ``at``, the ratio, whether its gradient is clipped, and doubly clipped."""
    low, high = 1 - o["clip"], 1 + (o["clip"] if o["clip_high"] is None else o["clip_high"])
    log_ratio = at - token.old
    if name == "GSPO":
        log_ratio = token.response_log_ratio + at - token.new
    ratio, advantage = math.exp(cut(log_ratio, o["log_ratio_clamp"])), token.advantage
    if name == "CISPO":
        still = math.exp(cut(token.new - token.old, o["log_ratio_clamp"]))
        weight = min(max(still, low), high)
        return -weight * advantage * at, still, weight != still, False
    if name == "SAPO":
        tau = o["tau_pos"] if advantage > 0 else o["tau_neg"]
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage, ratio, False, False
    if name == "GMPO":
        bounded, still = one_sided(log_ratio, advantage, o), one_sided(token.new - token.old, advantage, o)
        mean_ratio = math.exp(cut(token.response_clipped + bounded - still, o["log_ratio_clamp"]))
        return -mean_ratio * advantage, mean_ratio, bounded != log_ratio and advantage != 0, False
    if name in ("GPG", "DPPO"):
        still = math.exp(cut(token.new - token.old, o["log_ratio_clamp"]))
        if name == "GPG":
            return -advantage * at, still, False, False
        apart = binary_divergence(o["divergence"], token.new, token.old)
        further = high - 1 if advantage > 0 else 1 - low
        gated = apart > further and advantage * (token.new - token.old) > 0
        weight = still if o["ratio_cap"] is None else min(still, o["ratio_cap"])
        return 0.0 if gated else -weight * advantage * at, still, gated, False
    if name == "KLCov":
        return -ratio * advantage + o["old_kl_coef"] * token.marked * abs(at - token.old), ratio, False, False
    gain = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    is_clipped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
    doubly = o["dual_clip"] is not None and advantage < 0 and gain < o["dual_clip"] * advantage
    if doubly:
        gain = o["dual_clip"] * advantage
    return -gain * (1 - token.marked if name == "ClipCov" else 1), ratio, is_clipped, doubly


def trust(o, token):
    """Return the weight for what trainer and rollout differ by, and whether a bound changed it."""
    if o["tis_cap"] is None:
        return 1.0, False
    apart = {"token": token.old - token.rollout, "sequence": token.response_weight,
             "geometric": token.response_weight / token.response_tokens}[o["tis_level"]]  # fmt: skip
    weight = math.exp(min(max(apart, -FAR), FAR))
    floor = 0.0 if o["tis_floor"] is None else o["tis_floor"]
    inside = min(max(weight, floor), o["tis_cap"])
    return (0.0 if o["tis_bounds"] == "mask" and inside != weight else inside) / token.normaliser, inside != weight


def policy_loss(name, o, at, token):
    """Return the whole loss of a token at log-probability ``at``; ``o["kl_coef"]`` is that of the loss."""
    loss = surrogate(name, o, at, token)[0] * trust(o, token)[0] - o["entropy_coef"] * token.entropy
    return loss + (o["kl_coef"] * kl_in_loss(o, at, token) if o["kl_coef"] else 0.0)


def kl_in_loss(o, at, token):
    """Return the KL of a token in the loss; by ratio it is DeepSeek-V3.2's (section 3.1): pi / pi_old times the estimate."""
    estimate = kl(o["kl"], at, token.ref, o["log_ratio_clamp"], token.new)
    return estimate * math.exp(cut(at - token.old, o["log_ratio_clamp"])) if o.get("kl_by_ratio") else estimate


def policy_metrics(name, o, tokens):
    rows = defaultdict(list)
    for token in tokens:
        loss, ratio, is_clipped, doubly = surrogate(name, o, token.new, token)
        weight, outside = trust(o, token)
        rows["policy_loss"].append(loss * weight)
        rows["ratio"].append(ratio)
        rows["entropy"].append(token.entropy)
        rows["clip_fraction"].append(float(is_clipped))
        rows["approx_kl"].append(kl("k3", token.old, token.new))
        rows["approx_kl_k1"].append(token.old - token.new)
        if o["tis_cap"] is not None:
            rows["tis_mean"].append(weight)
            rows["tis_clip_fraction"].append(float(outside))
        if o["dual_clip"] is not None:
            rows["dual_clip_fraction"].append(float(doubly))
        if o["kl_coef"]:
            rows["kl_loss"].append(kl_in_loss(o, token.new, token))
    return {**{metric: mean(numbers) for metric, numbers in rows.items()}, "ratio_max": max(rows["ratio"])}


def weights(aggregation, samples, fixed_length):
    """Return by how much each token's loss counts in the mini-batch's."""
    num_tokens = sum(len(s) for s in samples)
    each = {
        "token_mean": lambda s: 1 / num_tokens, "sequence_mean": lambda s: 1 / len(samples) / len(s),
        "sequence_sum": lambda s: 1 / len(samples), "fixed_length": lambda s: 1 / len(samples) / fixed_length,
    }[aggregation]  # fmt: skip
    return [each(s) for s in samples for _ in range(len(s))]


def value_loss(clip, at, old, target):
    """PPO's critic (N details): half the larger of both squared errors, and whether the clipped one is."""
    error = (at - target) ** 2
    if clip is None:
        return error / 2, False
    bounded = (min(max(at, old - clip), old + clip) - target) ** 2
    return max(error, bounded) / 2, bounded > error


# -- losses of pairs


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def dpo(o, chosen, rejected):
    """Return the loss of a pair of responses, each a list of (log-probability, the reference's): arXiv 2305.18290, eq. 7."""
    ratios = [sum(a - b for a, b in tokens) for tokens in (chosen, rejected)]
    margin = ratios[0] - ratios[1]
    if o["kind"] == "ipo":
        loss = (ratios[0] / len(chosen) - ratios[1] / len(rejected) - 1 / (2 * o["beta"])) ** 2
    elif o["kind"] == "hinge":
        loss = max(0.0, 1 - o["beta"] * margin)
    else:
        wrong = o["label_smoothing"]
        loss = -(1 - wrong) * log_sigmoid(o["beta"] * margin) - wrong * log_sigmoid(-o["beta"] * margin)
    return loss - o["sft_coef"] * mean([a for a, _ in chosen])


def bradley_terry(o, chosen, rejected, margin):
    return -log_sigmoid(chosen - rejected - o["margin"] * margin) + o["center"] * (chosen + rejected) ** 2


def cost_loss(o, chosen, rejected, signs):
    """Safe-RLHF, eq. 6: the chosen response costs less; a sign of 1 is of a response that shall cost."""
    whether = log_sigmoid(signs[0] * chosen) + log_sigmoid(signs[1] * rejected)
    return -log_sigmoid(rejected - chosen) - o["sign_coef"] * whether


def overlong(o, tokens):
    """DAPO, eq. 13."""
    over = tokens - (o["max_new_tokens"] - o["buffer"])
    return -o["penalty"] * (0.0 if over <= 0 else 1.0 if over >= o["buffer"] else over / o["buffer"])


def slope(function, at, step=1e-6):
    return (function(at + step) - function(at - step)) / (2 * step)


# -- which tokens are marked (arXiv 2505.22617)


def covariances(samples, o, rows):
    log_probs, given = [x for s in samples for x in old_of(s, o)], [x for row in rows for x in row]
    return [(a - mean(log_probs)) * (b - mean(given)) for a, b in zip(log_probs, given, strict=True)]


GROUPED = (
    "GRPO", "GSPO", "CISPO", "DAPO", "DrGRPO", "KLCov", "ClipCov", "SAPO", "GMPO", "GPG", "DPPO", "GDPO", "PassAtKTraining",
)  # fmt: skip
KL_IN_LOSS = (*GROUPED, "ProcessGRPO", "ReinforcePlusPlusBaseline")
