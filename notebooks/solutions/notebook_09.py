"""Solutions of notebook 9."""

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.algorithms.step import Step

# Hours x devices x price.
dollars = 200 / 3600 * 128 * 2.0

# bf16 weight, fp32 gradient, fp32 master copy, two fp32 moments.
bytes_per_parameter = 2 + 4 + 4 + 4 + 4


class FrozenCritic(hf.PPO):
    """PPO whose critic judges, and does not learn."""

    def step(self, models, prompts):
        batch = models.actor.generate(prompts, max_new_tokens=self.max_new_tokens)
        batch = models.actor.compute_log_probs(batch)
        batch = models.reference.compute_log_probs(batch)
        batch = models.critic.compute_values(batch)
        batch = models.reward.compute_scores(batch)
        batch = ppo.advantages(batch, kl_coef=self.kl_coef)
        return Step(batch, None, models.actor.update(batch, self.policy_loss))


ANSWERS = {"09.1": dollars, "09.2": bytes_per_parameter, "09.3": FrozenCritic}
