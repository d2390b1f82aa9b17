"""Solutions of notebook 4."""

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.algorithms.step import Step

# 12 forward passes of a stage in an update are 2 epochs of 2 mini-batches: 3 micro-batches between two optimizer steps.
first_bubble = (2 - 1) / (3 + 2 - 1)


def bubble(p, m):
    """Share of the time in which a stage waits: each works m of the m + p - 1 turns."""
    return (p - 1) / (m + p - 1)


class OnePassLess(hf.PPO):
    """PPO with the rollout's log-probs as the ratio's denominator: ``hf.PPO(old_log_probs="rollout")`` does the same."""

    def step(self, models, prompts):
        batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens)
        batch = batch.alias("old_log_probs", "rollout_log_probs")
        batch = models.reference.compute_log_probs(batch)
        batch = models.critic.compute_values(batch)
        batch = models.reward.compute_scores(batch)
        batch = ppo.advantages(batch, kl_coef=self.kl_coef)
        critic = models.critic.update(batch, self.value_loss)
        actor = models.actor.update(batch, self.policy_loss)
        return Step(batch, critic, actor)


ANSWERS = {"04.1": first_bubble, "04.2": bubble, "04.3": OnePassLess}
