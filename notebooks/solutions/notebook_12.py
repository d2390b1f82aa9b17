"""Solutions of notebook 12."""

# The run goes on beside the controller; no kernel has a part in it.
done_again = 0

# Weights, batches and snapshots are in the workers' memory, and these end with the process that keeps the session.
goes_on_from = "the last save in the run's folder"


def reward(completions):
    """One for every completion that ends in a full stop."""
    return [1.0 if text.rstrip().endswith(".") else 0.0 for text in completions]


ANSWERS = {"12.1": done_again, "12.2": goes_on_from, "12.3": reward}
