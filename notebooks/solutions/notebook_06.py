"""Solutions of notebook 6."""

import re

# A snapshot holds what belongs to the session.
not_back = "a file that the cell wrote"


def distinct_words(completions):
    """Distinct words of at least four letters, whatever their case and the marks around them."""
    return [float(len({word for word in re.findall("[a-z']+", text.lower()) if len(word) > 3})) for text in completions]


def token_rewards(score, kl, kl_coef):
    """Every token pays for its KL; the score arrives with the last one (arXiv 2203.02155, equation 2)."""
    rewards = [-kl_coef * nats for nats in kl]
    rewards[-1] += score
    return rewards


ANSWERS = {"06.1": not_back, "06.2": distinct_words, "06.3": token_rewards}
