"""Runs the session of the README's first screen and prints it as Python's prompt would: ``python scripts/readme_transcript.py``."""

import ast
import sys

SESSION = """
import hfsdk as hf
from hfsdk.algorithms import ppo
session = hf.Session(devices=2)
actor = session.actor("tiny", train="tp2", rollout="dp2", optimizer=hf.AdamW(lr=3e-4))
critic = session.critic("tiny", optimizer=hf.AdamW(lr=1e-3))
reference = session.reference(actor)
reward = session.reward(hf.data.vader_sentiment)
batch = actor.generate(["The plot is ", "The acting was ", "I left the cinema "] * 8, max_new_tokens=32)
batch
batch = reference.compute_log_probs(actor.compute_log_probs(batch))
batch = reward.compute_scores(critic.compute_values(batch))
batch.text()[1], float(batch["scores"][1])
batch = ppo.advantages(batch, gamma=1.0, lam=0.95, kl_coef=0.05)
critic.update(batch, ppo.ValueLoss(clip=0.2)).wait()
actor.update(batch, ppo.PolicyLoss(clip=0.2), mini_batches=2).to_pandas()[["ratio", "clip_fraction", "grad_norm"]]
actor.reshard_plan
session.trace
session.close()
"""


def main() -> None:
    """Run statement by statement; show the value of each expression."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for statement in ast.parse(SESSION.strip()).body:
        source = ast.get_source_segment(SESSION.strip(), statement)
        print(">>> " + str(source))
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), "README", "eval"), namespace)
            if value is not None:
                print(repr(value))
        else:
            exec(compile(ast.Module([statement], []), "README", "exec"), namespace)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
