"""Solutions of notebook 10."""

from statistics import mean, stdev

# tp and pp cut the weights, dp copies them.
gigabytes = 137.95 / (8 * 8)


def strong_scaling(seconds, seconds_few, devices, devices_few):
    """Speed-up as a share of how many times as many devices there are."""
    return (seconds_few / seconds) / (devices / devices_few)


def whiten(advantages):
    """Whiten over the tokens of all ranks at once."""
    everything = [a for rank in advantages for a in rank]
    centre, spread = mean(everything), stdev(everything)
    return [[(a - centre) / spread for a in rank] for rank in advantages]


ANSWERS = {"10.1": gigabytes, "10.2": strong_scaling, "10.3": whiten}
