"""The numerics of RLHF: pure functions on flat tensors, without padding and without classes.

Shapes, as suffixes of names::

    T   response tokens of all sequences, one sequence after the other (flat: no padding, so nothing to mask)
    N   sequences; lengths_N says how many of the T tokens belong to each, and may be 0
    L   tokens of the longest response (padded, and only inside a function)

    lengths_N = [3, 0, 2]:   T = a0 a1 a2 c0 c1     the sequence in the middle is empty and owns no token

Position t of every per-token tensor belongs to response token t: ``log_probs_T[t]`` is the log-probability of that
token, ``values_T[t]`` the value of the state *before* it (prompt and the tokens up to t - 1), ``rewards_T[t]`` what
it earned. The state after the last token is terminal: its value is 0 and is not stored.

Sources, by short name:

* PPO: Schulman et al. 2017, arXiv 1707.06347. GAE: Schulman et al. 2016, arXiv 1506.02438.
* Ziegler: Ziegler et al. 2019, arXiv 1909.08593. InstructGPT: Ouyang et al. 2022, arXiv 2203.02155.
* GRPO: Shao et al. 2024, arXiv 2402.03300; Dr. GRPO: arXiv 2503.20783. RLOO: Ahmadian et al. 2024, arXiv 2402.14740.
* Schulman's note: http://joschu.net/blog/kl-approx.html. Dual clip: Ye et al. 2020, arXiv 1912.09729.
* N details: Huang et al., "The N implementation details of RLHF with PPO", 2023; N+ details: arXiv 2403.17031.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfsdk.algorithms.choices import DIVERGENCES, KL_KINDS, LOG_RATIO_CLAMPS
from hfsdk.core.credit import estimate
from hfsdk.core.errors import OptionError

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before ``exp``, so that one token cannot make a batch infinite; exp(20) is 5e8."""

MAX_CLAMPED_K3 = 10.0
"""Bound of the estimate k3 itself with ``clamp="both"``, as verl has it."""


def kl_estimate(log_probs_T: Tensor, ref_log_probs_T: Tensor, kind: str = "k1", clamp: str = "above") -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens that the policy sampled.

    With ``log r = ref_log_probs - log_probs``, so ``r = reference / policy`` (Schulman's note; Ziegler eq. 2 uses k1):

    ======  ===================  ===============================  ==============================================
    kind    value                as a number (added to a reward)  as a loss (differentiated)
    ======  ===================  ===============================  ==============================================
    k1      -log r               unbiased, may be negative        gradient zero in expectation: does nothing
    k1+     as k1                as k1                            as k2 (straight through; verl's name)
    k2      (log r)^2 / 2        biased, never negative           the gradient of KL(policy || reference)
    k3      (r - 1) - log r      unbiased, never negative         the gradient of KL(reference || policy)
    k3+     as k3                as k3                            as k2 (straight through)
    abs     |log r|              biased, never negative           no divergence's gradient; for comparison only
    ======  ===================  ===============================  ==============================================

    In k3 ``log r`` is cut at `MAX_LOG_RATIO` from above, where ``exp`` would overflow; the gradient is 0 beyond it.
    (verl also cuts below -20 and cuts the result at 10; that biases the estimate and is done with ``clamp="both"`` alone.)

    Args:
        log_probs_T: the policy's log-probabilities, shape [T].
        ref_log_probs_T: the reference's, shape [T].
        kind: a row of the table.
        clamp: one of `LOG_RATIO_CLAMPS`, for k3 and k3+.

    Returns:
        One estimate per token, in nats, shape [T]; gradients flow to both inputs.

    Raises:
        OptionError: another kind or clamp.
    """
    log_r_T = ref_log_probs_T - log_probs_T
    if kind in ("k1+", "k3+"):
        k2_T = 0.5 * log_r_T.square()
        return kl_estimate(log_probs_T, ref_log_probs_T, kind[:-1], clamp).detach() + (k2_T - k2_T.detach())
    if kind == "k1":
        return -log_r_T
    if kind == "k2":
        return 0.5 * log_r_T.square()
    if kind == "abs":
        return log_r_T.abs()
    if kind != "k3":
        raise OptionError(f"the KL estimators are {', '.join(KL_KINDS[:-1])} and {KL_KINDS[-1]}; got {kind!r}")
    log_r_T = _clamped(log_r_T, clamp)
    k3_T = torch.expm1(log_r_T) - log_r_T
    if clamp == "both":
        k3_T = k3_T.clamp(-MAX_CLAMPED_K3, MAX_CLAMPED_K3)
    return k3_T


def adaptive_kl_coef(kl_coef: float, kl: float, *, target: float, num_samples: int, horizon: int = 10_000) -> float:
    """Return the next KL coefficient of a proportional controller (Ziegler, section 2.2).

    ``kl_coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)``, as OpenAI's code has it.

    Args:
        kl_coef: the present coefficient.
        kl: measured KL per sequence (summed over its tokens, averaged over the batch), in nats.
        target: KL per sequence to be held, in nats; above 0.
        num_samples: sequences in the batch that was measured.
        horizon: sequences over which a full error changes the coefficient by 20 %.

    Raises:
        OptionError: ``target`` or ``horizon`` is not above 0.
    """
    if target <= 0 or horizon <= 0:
        raise OptionError(f"target and horizon must be above 0; got target={target}, horizon={horizon}")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * num_samples / horizon)


def token_rewards(
    scores_N: Tensor, kl_T: Tensor, lengths_N: Tensor, kl_coef: float, clip: float | None = None,
    token_scores_T: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Spread the reward over tokens: ``-kl_coef * kl`` on each, the score on the last (InstructGPT eq. 2).

    An empty response has no token, so its score goes nowhere: no action was taken that could be reinforced.

    Args:
        scores_N: one score per sequence, shape [N].
        kl_T: KL estimate per token (see `kl_estimate`), shape [T].
        lengths_N: response lengths, shape [N].
        kl_coef: beta, in score units per nat.
        clip: scores are cut to [-clip, clip] first; ``None`` leaves them.
        token_scores_T: a score of each token's own, shape [T]; they take the place of ``scores_N``, their sums.

    Returns:
        Rewards, shape [T].
    """
    if token_scores_T is not None:
        return (token_scores_T if clip is None else token_scores_T.clamp(-clip, clip)) - kl_coef * kl_T
    scores_N = scores_N if clip is None else scores_N.clamp(-clip, clip)
    return _add_at_last_token(-kl_coef * kl_T, scores_N, lengths_N)


def missing_eos_penalty(rewards_T: Tensor, ended_N: Tensor, lengths_N: Tensor, penalty: float) -> Tensor:
    """Subtract ``penalty`` at the last token of every sequence that was cut off (as TRL does).

    It comes after score clipping, which therefore cannot hide it. The EOS trick of the N+ details *replaces* such a
    score by -1 instead.

    Args:
        rewards_T: rewards, shape [T].
        ended_N: whether the sequence ended by itself, bool, shape [N].
        lengths_N: response lengths, shape [N].
        penalty: the penalty in score units, at least 0.

    Returns:
        Rewards, shape [T].
    """
    return _add_at_last_token(rewards_T, -penalty * (~ended_N).to(rewards_T.dtype), lengths_N)


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    lengths_N: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates and returns (GAE eq. 16), backwards over each response.

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t+1}``, with V = A = 0 after the
    last token; ``returns = A + V``, the target of the critic (TD(lambda)).

    Args:
        rewards_T: rewards, shape [T].
        values_T: value of the state before each token, shape [T].
        lengths_N: response lengths, shape [N].
        gamma: discount per token; 1 in RLHF.
        lam: 0 is one-step TD (little variance), 1 is reward-to-go minus value (no bias).
        bootstrap_values_N: value of the state after the last token, shape [N], for tasks in which a cut-off sequence
            would have gone on: V(last state) where cut off, 0 where ended. ``None``, as in RLHF, makes every last
            state terminal.

    Returns:
        Advantages (not whitened) and returns, both of shape [T].
    """
    mask_NL = _mask(lengths_N)
    rewards_NL, values_NL = _pad(rewards_T, mask_NL), _pad(values_T, mask_NL)
    # The value behind a response's last token is 0: in RLHF the episode ends there.
    next_values_NL = torch.zeros_like(values_NL)
    next_values_NL[:, :-1] = values_NL[:, 1:]
    if bootstrap_values_N is not None:
        rows = torch.nonzero(lengths_N > 0).squeeze(1)
        next_values_NL[rows, lengths_N[rows] - 1] = bootstrap_values_N[rows].to(next_values_NL.dtype)
    advantages_NL = torch.zeros_like(values_NL)
    estimate(rewards_NL, values_NL, next_values_NL, gamma, lam, advantages_NL)  # deltas behind a row's end are 0: A = 0 there
    advantages_T = advantages_NL[mask_NL]
    return advantages_T, advantages_T + values_T


def reward_to_go(rewards_T: Tensor, lengths_N: Tensor, gamma: float = 1.0) -> Tensor:
    """Return ``G_t = r_t + gamma * G_{t+1}``, what each response still earns from token t on; shape [T].

    It is `gae` with lambda 1 and no critic (all values 0): the return of REINFORCE.
    """
    return gae(rewards_T, torch.zeros_like(rewards_T), lengths_N, gamma, 1.0)[0]


def log_sigmoid(x_N: Tensor) -> Tensor:
    """Return ``log(1 / (1 + exp(-x)))`` without overflow, shape [N]."""
    return torch.nn.functional.logsigmoid(x_N)


def bradley_terry(better_P: Tensor, worse_P: Tensor, margin_P: Tensor | float = 0.0) -> Tensor:
    """Return ``-log sigmoid(better - worse - margin)`` per pair, shape [P] (InstructGPT eq. 1; Llama 2 eq. 2)."""
    return -log_sigmoid(better_P - worse_P - margin_P)


def masked_mean(x_T: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Return the mean over the tokens where ``mask_T`` is true (all without a mask); NaN over no token at all.

    It is never outside the lowest and the highest of them, where the rounding of a sum may lie; so of equal numbers it is exactly
    that number, in any precision.
    """
    x_T = x_T if mask_T is None else x_T[mask_T]
    mean = x_T.mean()
    if not x_T.numel():
        return mean
    # The gradient stays that of the mean; only its value is moved inside the bounds.
    bounded = mean.detach().clamp(x_T.detach().min(), x_T.detach().max())
    return torch.where(bounded == mean, mean, mean - mean.detach() + bounded)


def masked_var(x_T: Tensor, mask_T: Tensor | None = None, unbiased: bool = True) -> Tensor:
    """Return the variance over the tokens where ``mask_T`` is true (all of them without a mask).

    ``unbiased`` divides by T - 1, as TRL and verl do; OpenAI's first RLHF code divides by T. One token has variance 0
    either way (TRL gives NaN there, verl raises), and so have equal numbers: exactly, in any precision.
    """
    x_T = x_T if mask_T is None else x_T[mask_T]
    if x_T.numel() < 2:
        return x_T.mean() * 0.0  # NaN over no token at all
    return torch.where(x_T.max() - x_T.min() == 0, 0.0, x_T.var(correction=1 if unbiased else 0))


def whiten(x_T: Tensor, shift_mean: bool = True, unbiased: bool = True) -> Tensor:
    """Scale to variance 1 and, with ``shift_mean``, to mean 0 (N details).

    Advantages lose their mean; rewards keep it (``shift_mean=False``), because their mean is what the critic learns.
    Call it on the whole batch: whitening the parts separately is another algorithm.

    Args:
        x_T: the values, shape [T].
        shift_mean: whether the mean becomes 0.
        unbiased: see `masked_var`.

    Returns:
        ``(x - mean) / sqrt(var + 1e-8)``, plus the mean again without ``shift_mean``; shape [T]. Constant input gives
        exactly 0 (the constant without ``shift_mean``), in any precision: an optimizer as Adam makes a full step of the least rest.
    """
    mean = masked_mean(x_T)
    whitened_T = (x_T - mean) * torch.rsqrt(masked_var(x_T, unbiased=unbiased) + 1e-8)
    return whitened_T if shift_mean else whitened_T + mean


def importance_ratio(log_probs_T: Tensor, old_log_probs_T: Tensor, clamp: str = "above") -> Tensor:
    """Return ``exp(log_probs - old_log_probs)``, shape [T]; ``clamp`` is one of `LOG_RATIO_CLAMPS`."""
    return _clamped(log_probs_T - old_log_probs_T, clamp).exp()


def binary_divergence(log_probs_T: Tensor, old_log_probs_T: Tensor, kind: str = "tv") -> Tensor:
    """Return how far two policies are apart at each token, of the distributions "this token or another" (arXiv 2602.04879).

    ``"tv"`` is their total variation ``|pi - pi_old|``, ``"kl"`` is KL(pi_old || pi), ``pi_old log(pi_old / pi) + (1 - pi_old)
    log((1 - pi_old) / (1 - pi))``: lower bounds of those of the whole distributions. Exactly 0 where the two are equal.

    Args:
        log_probs_T: log-probabilities of the policy being trained, shape [T].
        old_log_probs_T: log-probabilities of the policy that sampled, shape [T].
        kind: ``"tv"`` or ``"kl"``.

    Returns:
        The divergence, without gradient, shape [T]; infinite where the policy has a probability of 1 and the older one had not.

    Raises:
        OptionError: another kind.
    """
    if kind not in DIVERGENCES:
        raise OptionError(f"the divergences are {' and '.join(DIVERGENCES)}; got {kind!r}")
    # Rounding may make a log-probability positive, and with it 1 - p negative under the logarithm.
    new_T, old_T = log_probs_T.detach().clamp(max=0.0), old_log_probs_T.detach().clamp(max=0.0)
    if kind == "tv":
        return (new_T.exp() - old_T.exp()).abs()
    others_T = -torch.expm1(old_T)
    of_token_T = torch.where(old_T.exp() > 0, old_T.exp() * (old_T - new_T), 0.0)  # 0 log 0 is 0
    of_others_T = torch.where(others_T > 0, others_T * (others_T.log() - torch.log(-torch.expm1(new_T))), 0.0)
    return torch.where(new_T == old_T, 0.0, (of_token_T + of_others_T).clamp(min=0.0))


def policy_loss_terms(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    clamp: str = "above",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the clipped surrogate loss per token (PPO eq. 7, as a loss), its ratio, and where it was clipped.

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(log_probs - old_log_probs)``. Different
    bounds are DAPO's clip-higher (arXiv 2503.14476, section 3.1). ``dual_clip`` = c bounds the loss of negative
    advantages by ``-c A`` (Ye et al.). The log-ratio is cut at `MAX_LOG_RATIO` from above.

    Args:
        log_probs_T: log-probabilities of the policy being trained, shape [T]; carries the gradient.
        old_log_probs_T: log-probabilities of the policy that the batch belongs to, shape [T].
        advantages_T: advantages, shape [T].
        clip_low: epsilon below 1.
        clip_high: epsilon above 1.
        dual_clip: c, above 1, or ``None``.
        clamp: one of `LOG_RATIO_CLAMPS`.

    Returns:
        Loss, ratio, whether the clip cut this token's gradient, whether the dual clip did (bool); all of shape [T]. A
        token outside the bounds that the loss would move back inside is not clipped.
    """
    ratio_T = importance_ratio(log_probs_T, old_log_probs_T, clamp)
    plain_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = torch.maximum(plain_T, bounded_T)
    # The maximum takes the bounded term, which has no gradient, exactly where it is the larger.
    clipped_T = bounded_T > plain_T
    dual_clipped_T = torch.zeros_like(clipped_T)
    if dual_clip is not None:
        bound_T = -dual_clip * advantages_T
        dual_clipped_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(dual_clipped_T, bound_T, loss_T)
    return loss_T, ratio_T, clipped_T, dual_clipped_T


def value_loss_terms(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return half the squared error of the critic per token, clipped around the old values.

    ``0.5 * max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)`` (OpenAI baselines' PPO; N details).

    Args:
        values_T: values of the critic being trained, shape [T]; carries the gradient.
        old_values_T: values of the critic before this batch, the ones the returns were made with, shape [T].
        returns_T: targets, shape [T].
        clip: the largest change, in value units; ``None`` turns clipping off.

    Returns:
        Loss, and whether the clipped error was the larger (bool); both of shape [T].
    """
    error_T = (values_T - returns_T).square()
    if clip is None:
        return 0.5 * error_T, torch.zeros_like(error_T, dtype=torch.bool)
    bounded_T = torch.minimum(torch.maximum(values_T, old_values_T - clip), old_values_T + clip)
    bounded_error_T = (bounded_T - returns_T).square()
    return 0.5 * torch.maximum(error_T, bounded_error_T), bounded_error_T > error_T


def explained_variance(values_T: Tensor, returns_T: Tensor) -> Tensor:
    """Return ``1 - Var(returns - values) / Var(returns)``: 1 is a perfect critic, 0 no better than a constant.

    From OpenAI baselines. NaN where the returns do not vary.
    """
    variance = masked_var(returns_T, unbiased=False)
    if returns_T.numel() == 0 or variance == 0:
        return torch.full_like(variance, torch.nan)
    return 1.0 - masked_var(returns_T - values_T, unbiased=False) / variance


def sequence_sum(x_T: Tensor, lengths_N: Tensor) -> Tensor:
    """Return the sum of each sequence's tokens, shape [N]; 0 for an empty one."""
    rows_T = torch.repeat_interleave(torch.arange(len(lengths_N), device=x_T.device), lengths_N)
    return torch.zeros(len(lengths_N), dtype=x_T.dtype, device=x_T.device).index_add(0, rows_T, x_T)


def _clamped(log_ratio_T: Tensor, clamp: str) -> Tensor:
    if clamp not in LOG_RATIO_CLAMPS:
        raise OptionError(f"the bounds of a log-ratio are above, both or none; got {clamp!r}")
    if clamp == "none":
        return log_ratio_T
    return log_ratio_T.clamp(min=-MAX_LOG_RATIO if clamp == "both" else None, max=MAX_LOG_RATIO)


def _add_at_last_token(x_T: Tensor, add_N: Tensor, lengths_N: Tensor) -> Tensor:
    present_N = lengths_N > 0
    ends = (lengths_N.cumsum(0) - 1)[present_N]
    return x_T.index_add(0, ends, add_N[present_N].to(x_T.dtype))


def _mask(lengths_N: Tensor) -> Tensor:
    longest = int(lengths_N.max()) if lengths_N.numel() else 0
    return torch.arange(longest, device=lengths_N.device)[None, :] < lengths_N[:, None]


def _pad(x_T: Tensor, mask_NL: Tensor) -> Tensor:
    x_NL = torch.zeros(mask_NL.shape, dtype=x_T.dtype, device=x_T.device)
    x_NL[mask_NL] = x_T
    return x_NL
