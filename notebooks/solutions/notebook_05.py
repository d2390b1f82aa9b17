"""Solutions of notebook 5."""

import hfsdk as hf
from hfsdk.algorithms import remax
from hfsdk.algorithms.step import Step

# Mean 0.25; deviation with n - 1: sqrt((0.75**2 + 3 * 0.25**2) / 3) = 0.5.
grpo_advantage = (1 - 0.25) / 0.5


def leave_one_out(scores):
    """RLOO's advantages (arXiv 2402.14740): each score minus the mean of the others."""
    return [score - (sum(scores) - score) / (len(scores) - 1) for score in scores]


class AgainstGreedy(hf.PPO):
    """ReMax's calls (arXiv 2310.10505): the greedy response's score is what a sampled one is expected to reach."""

    def step(self, models, prompts):
        batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens)
        greedy = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens, temperature=0.0)
        batch = models.actor.compute_log_probs(batch)
        batch, greedy = models.reward.compute_scores(batch), models.reward.compute_scores(greedy)
        batch = remax.advantages(remax.with_baselines(batch, greedy), kl_coef=0.0)
        return Step(batch, None, models.actor.update(batch, self.policy_loss))


ANSWERS = {"05.1": grpo_advantage, "05.2": leave_one_out, "05.3": AgainstGreedy}
