"""Solutions of notebook 11."""

import math

# Saved after step 15; steps 16 and 17 were finished after it.
done_again = 17 - 15

# The step is finished, so that training can go on after it.
first_interrupt = "it pauses after the running step"


def ratio(new, old):
    """Probability now over probability then; the difference is cut before exp."""
    return [math.exp(min(max(n - o, -20.0), 20.0)) for n, o in zip(new, old, strict=True)]


ANSWERS = {"11.1": done_again, "11.2": first_interrupt, "11.3": ratio}
