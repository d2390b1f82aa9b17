"""A Ray that was told of four GPUs, on a machine that has none: what a session says and does. Told as lines of JSON, see
test_system_gpus.py: ``python fake_gpus.py``."""

import json
import logging
import os

os.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"  # as a scheduler gives a part of a machine's GPUs
import ray


def tell(name, value):
    print(json.dumps([name, value]), flush=True)


def failure(function):
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


@ray.remote(num_gpus=1, num_cpus=0)
class Shown:
    """A worker that says what it was given and what it sees."""

    def look(self):
        from hfsdk.engine.gpus import Seen

        given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return given, visible, Seen(visible, 4, "2.13.0+cu130").index(given)


def main():
    import hfsdk as hf
    from hfsdk.engine.gpus import SHOW_ALL

    ray.init(
        address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )  # fmt: skip
    workers = [Shown.options(runtime_env={"env_vars": SHOW_ALL}).remote() for _ in range(2)]
    tell("shown", ray.get([worker.look.remote() for worker in workers]))
    for worker in workers:
        ray.kill(worker)
    tell("too many", failure(lambda: hf.Session(5)))
    with hf.Session(2) as session:
        tell("cluster", [str(session.cluster), session.cluster.num_devices])
        actor = session.actor("tiny", train="tp2", rollout="tp2")
        prompts = session.prompts(["a", "b"], batch_size=2)
        tell("first call", failure(lambda: actor.generate(prompts[0], max_new_tokens=2).wait()))
    ray.shutdown()


if __name__ == "__main__":
    main()
