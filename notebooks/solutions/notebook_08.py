"""Solutions of notebook 8."""

# The trainer's passes agree with each other; only the engine that drew the tokens knows better.
tells = "rollout gap"

# Two tokens of mean 1 and eight of mean 2, over ten tokens.
right_loss = (2 * 1.0 + 8 * 2.0) / 10


def gae(rewards, values, gamma, lam):
    """Generalised advantage estimation (arXiv 1506.02438, equation 16), backwards; behind the last token all is 0."""
    advantages, next_advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        next_advantage, next_value = delta + gamma * lam * next_advantage, value
        advantages.append(next_advantage)
    return advantages[::-1]


ANSWERS = {"08.1": tells, "08.2": right_loss, "08.3": gae}
