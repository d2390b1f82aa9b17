"""Solutions of notebook 1."""

# With gamma = lambda = 1 an advantage is what is still earned minus what was expected: (0 + 0 + 1) - 0.5.
first_advantage = (0 + 0 + 1) - 0.5

# Before any step the policy is the one that wrote the batch: every ratio is 1 unless its denominator is wrong.
culprit = "the ratio's old log-probs"


def clipped(out, b):
    """PPO's objective (arXiv 1707.06347, equation 7), negative, because an optimizer makes a loss smaller."""
    ratio = (out.log_probs - b["old_log_probs"]).exp()
    free, cut = ratio * b["advantages"], ratio.clamp(0.8, 1.2) * b["advantages"]
    return -free.minimum(cut)


ANSWERS = {"01.1": first_advantage, "01.2": culprit, "01.3": clipped}
