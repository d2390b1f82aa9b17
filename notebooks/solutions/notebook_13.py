"""Solutions of notebook 13."""

# actor.last_reshard.wrong names a box of model.layers.1.mlp.down_proj.weight: it left as one thing and arrived as another.
first = "a weight changed on its way"

# The column says 1, and the experiment with another temperature takes the gap away at 0.7.
second = "a forgotten temperature"

# policy_version is what the weights had seen when the batch was drawn; actor.version is what they have seen now.
third = "weights of before an update"

# first_bad names a parameter and rank 1: the weight was infinite before the step's calls used it.
fourth = "a weight that is infinite"

# first_bad names no weight and no column, but the mini-batch and the sample of an update.
fifth = "a loss that divides by zero"

# The rank correlation of scores and lengths is near 1.
sixth = "a reward that follows length"

# d * r = 0 modulo 2^32 with odd r means that 2^32 divides d, and a change of 32 bits is smaller.
missed = 0


def reward(completions):
    """The share of exclamation marks; no score where there is no text."""
    return [text.count("!") / len(text) if text.strip() else None for text in completions]


ANSWERS = {
    "13.1": first, "13.2": second, "13.3": third, "13.4": fourth, "13.5": fifth, "13.6": sixth, "13.7": missed, "13.8": reward,
}  # fmt: skip
