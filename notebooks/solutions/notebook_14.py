"""Solutions of notebook 14."""

# A has 16 rows of 256, B 704 rows of 16.
numbers = 16 * (256 + 704)

# A stands where the weight's columns are: each rank multiplies its part of the input, and A x is summed over tp. B is whole.
cut = "A"

# The base once; of each of the two that are trained the adapters, their gradient and two moments.
megabytes = 500 + 2 * 4 * 20

# B A x is zero whatever A is, and B's gradient is not, because A is drawn.
why = "B is zero"


def merge(W, A, B, alpha, rank_stabilised):
    """Return W with the adapter added."""
    rank = A.shape[0]
    return W + alpha / (rank**0.5 if rank_stabilised else rank) * B @ A


ANSWERS = {"14.1": numbers, "14.2": cut, "14.3": megabytes, "14.4": why, "14.5": merge}
