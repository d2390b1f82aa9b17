"""Solutions of notebook 7."""

import math

# sigmoid(0) is a half.
first_loss = -math.log(1 / 2)


def with_margin(chosen, rejected, margin):
    """Bradley-Terry with a margin (arXiv 2307.09288, equation 2): -log sigmoid(chosen - rejected - margin)."""
    return math.log(1 + math.exp(-(chosen - rejected - margin)))


def next_multiplier(multiplier, cost, limit, lr):
    """The gradient step of ln lambda (arXiv 2310.12773, equation 31 without its average): lambda stays positive."""
    return math.exp(math.log(multiplier) + lr * multiplier * (cost - limit))


ANSWERS = {"07.1": first_loss, "07.2": with_margin, "07.3": next_multiplier}
