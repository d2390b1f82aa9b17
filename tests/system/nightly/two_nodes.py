"""One run over two nodes, told as lines of JSON ``[name, value]``: ``python two_nodes.py``, see test_system_nodes.py.

The cluster is that of another process, which this one starts; the second node has a cache of its own, and is told not to
look for models where the user's machine has them.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HOLDER = """
import json, os, sys
from ray.cluster_utils import Cluster

def start(make):
    for tries_left in (2, 1, 0):
        try:
            return make()
        except Exception:  # an agent that is too slow on a busy machine ends its node
            if not tries_left:
                raise

options = dict(num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20)
cluster = start(lambda: Cluster(initialize_head=True, head_node_args=options))
second = start(lambda: cluster.add_node(**options, env_vars=json.loads(sys.argv[1])))
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "add":
        second = start(lambda: cluster.add_node(**options, env_vars=json.loads(sys.argv[1])))
    else:
        cluster.remove_node(second)
    print("done", flush=True)
cluster.shutdown()
"""


def tell(name, value):
    print(json.dumps([name, value, round(time.monotonic() - START, 1)]), flush=True)


START = time.monotonic()


def failure(function, *errors):
    try:
        function()
    except errors as error:
        return [type(error).__name__, str(error)]
    return None


def main(holder, address, cache):
    import psutil
    from system_helpers import fingerprint, lengths_reward, ppo_step

    import hfsdk as hf
    from hfsdk.core.placement import Placement, Pool

    tell("no_cluster", failure(lambda: hf.Session("127.0.0.1:1"), hf.PlacementError))
    session = hf.Session(address, seed=3, name="two nodes")
    tell("cluster", [str(session.cluster), [session.cluster.node_of(d) for d in range(session.cluster.num_devices)]])
    tell("other_address", failure(lambda: hf.Session("127.0.0.1:1"), hf.PlacementError))

    def place(**pools):
        roles = {role: name for name in pools for role in name.split("_")}
        return session.place(Placement(tuple(Pool(name, devices) for name, devices in pools.items()), roles))

    def place_of_code(rank):
        import hfsdk

        print(f"here is {rank.role} on device {rank.device}")
        return hfsdk.__file__, os.getpid(), rank._hosted.worker.setup.store.split(":")[0]

    def folder(rank):
        from hfsdk.engine.weights.model_folders import home

        return rank._hosted.groups is not None and [str(p) for p in sorted((home() / "models" / "fetched").glob("*"))]

    actor = session.actor("tiny", train="tp2", rollout="tp2", optimizer=hf.AdamW(lr=3e-4))
    critic = session.critic("tiny", train="tp1", optimizer=hf.AdamW(lr=1e-3))
    reference = session.reference(actor)
    reward = session.reward(lengths_reward)
    prompts = session.prompts(["the film is a", "a warm and funny", "dull", "the plot is thin but"], batch_size=4, seed=1)
    roles = type("Roles", (), {"actor": actor, "critic": critic, "reference": reference, "reward": reward, "prompts": prompts})

    def step(k):
        done = ppo_step(roles, k, max_new_tokens=6)
        table = done.batch.table("rollout_log_probs", "old_log_probs", "response")
        gap = float(abs(table["rollout_log_probs"].flat - table["old_log_probs"].flat).max())
        rows = [*done.critic.rows, *done.actor.rows]
        return {"gap": gap, "finite": all(x == x for row in rows for x in row.values() if isinstance(x, float)), "rows": len(rows)}

    picture = place(actor_reference=(1, 2), critic=(3,))
    tell("picture", repr(picture))
    tell("across", step(0))
    tell("code", [actor.run(place_of_code), critic.run(place_of_code)])
    tell("logs", [session.logs("actor", 0), session.logs("actor", 1), session.logs("critic")])
    tell("folders", [actor.run(folder), str(cache)])
    greedy = actor.generate(prompts[0], max_new_tokens=6, temperature=0.0)["response"]
    before = [actor.run(fingerprint), critic.run(fingerprint)]

    place(actor_reference=(0, 1), critic=(2, 3))
    after = [actor.run(fingerprint), critic.run(fingerprint)]
    again = actor.generate(prompts[0], max_new_tokens=6, temperature=0.0)["response"]
    tell("moved", {"before": before, "after": after, "same_text": greedy == again, "store": actor.run(place_of_code)[0][2]})
    tell("within", step(1))

    place(**{"actor_reference_critic": (0, 1), "actor.rollout": (2, 3)})
    batch = actor.compute_log_probs(actor.generate(prompts[0], max_new_tokens=6, temperature=0.0))
    table, plan, report = batch.table("rollout_log_probs", "old_log_probs"), actor.reshard_plan, actor.last_reshard
    gap = float(abs(table["rollout_log_probs"].flat - table["old_log_probs"].flat).max())
    received = [[rank.bytes_received for rank in report.ranks], [plan.bytes_received(rank) for rank in range(plan.num_ranks)]]
    links = {link: list(counts) for link, counts in report.bytes_by_link().items()}
    tell("shadow", {"gap": gap, "nodes": plan.nodes, "received": received, "links": links, "all": actor.spec.num_bytes("fp32")})
    place(actor_reference=(0, 1), critic=(2, 3))

    victims = [pid for _, pid, _ in critic.run(place_of_code)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    batch = actor.generate(prompts[1], max_new_tokens=4)
    tell("other_node", len(batch["response"]))
    tell("killed", failure(lambda: critic.compute_values(batch).wait(), hf.WorkerDiedError))
    tell("back", len(critic.compute_values(batch)["values"]))

    holder.stdin.write("remove\n")
    holder.stdin.flush()
    holder.stdout.readline()
    tell("removed", failure(lambda: critic.compute_values(batch).wait(), hf.WorkerDiedError))
    tell("lost", failure(lambda: critic.compute_values(batch).wait(), hf.PlacementError, hf.CallError))
    place(actor_reference_critic=(0, 1))
    tell("one_node", len(critic.compute_values(actor.generate(prompts[2], max_new_tokens=4))["values"]))
    children = [p.pid for p in psutil.Process().children(recursive=True)]
    session.close()
    tell("end", children)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory(prefix="hfsdk-two-nodes-") as cache:
        variables = json.dumps({"HFSDK_FETCH_MODELS": "always", "HFSDK_HOME": cache})
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, variables], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            address = holder.stdout.readline().strip()
            tell("start", [holder.pid, address])
            main(holder, address, cache)
        except BaseException:  # said now: this process ends with the cluster
            traceback.print_exc()
            raise
        finally:
            holder.stdin.close()
            holder.wait(60)
