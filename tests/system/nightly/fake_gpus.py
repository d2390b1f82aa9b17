"""A Ray of two nodes that were told of two GPUs each, on a machine that has none: what a session says and does. Told as lines of
JSON, see test_system_gpus.py: ``python fake_gpus.py``."""

import json
import logging
import os

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

VISIBLE = ("4,5", "2,6")
"""``CUDA_VISIBLE_DEVICES`` of each node, as a scheduler gives a part of a machine's GPUs."""
START_TRIES = 3
"""An agent that is too slow on a busy machine ends its node."""


def tell(name, value):
    print(json.dumps([name, value]), flush=True)


def failure(function):
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def start():
    """Start both nodes and connect to them; return the cluster, which ends with this process, and the nodes' ids in Ray."""
    options = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False, "object_store_memory": 200 * 2**20}
    for tries_left in reversed(range(START_TRIES)):
        cluster = Cluster()
        try:
            nodes = [cluster.add_node(**options, env_vars={"CUDA_VISIBLE_DEVICES": visible}) for visible in VISIBLE]
            break
        except Exception:
            cluster.shutdown()
            if not tries_left:
                raise
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    return cluster, [node.node_id for node in nodes]


@ray.remote(num_gpus=1, num_cpus=0)
class Shown:
    """A worker that says what it was given and what it sees."""

    def look(self):
        from hfsdk.engine.process.gpus import Seen

        given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return given, visible, Seen(visible, 2, "2.13.0+cu130").index(given)


def main():
    import hfsdk as hf
    from hfsdk.engine.process.gpus import SHOW_ALL

    cluster, nodes = start()
    workers = [
        Shown.options(
            runtime_env={"env_vars": SHOW_ALL}, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node in nodes for _ in range(2)
    ]  # fmt: skip
    tell("shown", ray.get([worker.look.remote() for worker in workers]))
    for worker in workers:
        ray.kill(worker)
    tell("too many", failure(lambda: hf.Session(5)))
    with hf.Session(3) as session:
        tell("three", [str(session.cluster), [session.cluster.node_of(device) for device in range(3)]])
    with hf.Session(2) as session:
        tell("cluster", [str(session.cluster), session.cluster.num_devices])
        actor = session.actor("tiny", train="tp2", rollout="tp2")
        prompts = session.prompts(["a", "b"], batch_size=2)
        tell("first call", failure(lambda: actor.generate(prompts[0], max_new_tokens=2).wait()))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
