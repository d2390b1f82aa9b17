"""Writes ``hfsdk/configs/keys/*.txt``: the keys of verl, TRL, OpenRLHF and NeMo-RL, and their defaults, from their sources.

``python make_config_keys.py VERL TRL TRL_PPO ACCELERATE OPENRLHF OPENRLHF_OLD... NEMO``: folders with the packages ``verl`` 0.9.1,
``trl`` 1.16.0 and 1.9.0, ``accelerate`` 1.15.0, ``openrlhf`` 0.11.2 and its old releases 0.5.9, 0.8.11 and 0.9.10 (their wheels,
unpacked), and a checkout of NeMo-RL v0.7.0. Files are read and parsed, none is run or imported.

A line is a key, or ``key = default`` as JSON where the default is a plain value.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

OF_VERLS_CODE = ("model_engine", "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights")
"""Keys that verl reads and that none of its YAML has; the last two are fields of ``AlgoConfig``."""
KEYS = Path(__file__).parents[2] / "hfsdk" / "configs" / "keys"
UNKNOWN = object()
"""The default of a key whose value is worked out when it runs."""


def leaves(tree: object, before: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {before.rstrip("."): tree} if before else {}
    return {key: value for name, part in tree.items() for key, value in leaves(part, f"{before}{name}.").items()}


def yaml_keys(files: list[Path], of_defaults: int) -> dict[str, Any]:
    """Return the keys of all files; defaults are those of the first files."""
    found: dict[str, Any] = {}
    for number, file in enumerate(files):
        for key, value in leaves(yaml.safe_load(file.read_text())).items():
            found.setdefault(key, value if number < of_defaults else UNKNOWN)
    for key, value in list(found.items()):  # a reference to a mapping stands for its keys, in what a run saves of itself
        named = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,.*)?\}", value) if isinstance(value, str) else None
        for other in [one for one in found if named is not None and one.startswith(f"{named[1]}.")]:
            found.setdefault(key + other.removeprefix(named[1]), f"${{{other}}}")
    return found


def literal(node: ast.AST | None) -> Any:
    try:
        return UNKNOWN if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def field_defaults(file: Path) -> dict[str, Any]:
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    items = [item for one in classes for item in one.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    return {item.target.id: field_default(item.value) for item in items}


def field_default(node: ast.AST | None) -> Any:
    if isinstance(node, ast.Call):
        node = next((word.value for word in node.keywords if word.arg == "default"), None)
    return literal(node)


def flags(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield what argparse is given: flags and their defaults; those of a loop over prefixes for ``actor`` and ``critic``."""
    for call in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument" and call.args):
            continue
        words = {word.arg: word.value for word in call.keywords}
        stored = literal(words.get("action"))
        default = literal(words["default"]) if "default" in words else False if stored == "store_true" else None
        name = call.args[0]
        if isinstance(name, ast.Constant):
            yield str(name.value).lstrip("-"), default
        elif isinstance(name, ast.JoinedStr):
            rest = str(name.values[-1].value)
            yield from ((f"{role}{rest}", default) for role in ("actor", "critic"))


def write(name: str, release: str, keys: dict[str, Any]) -> None:
    KEYS.mkdir(exist_ok=True)
    lines = [f"# keys of {release}"]
    for key in sorted(keys):
        value = keys[key]
        plain = isinstance(value, (bool, int, float, str, list, tuple, dict)) or value is None
        text = json.dumps(value, allow_nan=True) if plain else ""
        lines.append(f"{key} = {text}" if text and len(text) < 200 else key)
    (KEYS / f"{name}.txt").write_text("\n".join(lines) + "\n")


TORCHRUN = (
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone",
    "start_method", "local_addr",
)  # fmt: skip
DEEPSPEED = (
    "num_gpus", "num_nodes", "include", "exclude", "hostfile", "launcher", "force_multi", "enable_each_rank_log", "deepspeed",
)  # fmt: skip
BUFFERS: dict[str, Any] = {
    f"deepspeed.zero_optimization.{key}": value
    for key, value in {
        "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e5,
        "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False,
    }.items()
}  # fmt: skip
"""DeepSpeed's own defaults (``deepspeed/runtime/zero/config.py``)."""


def main(verl: Path, trl: Path, trl_ppo: Path, accelerate: Path, openrlhf: Path, *others: Path) -> None:
    *old, nemo = others
    configs = verl / "trainer" / "config"
    first = [configs / f"_generated_ppo_{engine}trainer.yaml" for engine in ("", "megatron_")]
    of_verl = yaml_keys([*first, *sorted(set(configs.glob("_generated_ppo_*.yaml")) - set(first))], 2)
    write("verl", "verl 0.9.1", of_verl | dict.fromkeys(OF_VERLS_CODE, UNKNOWN))
    import transformers.training_args as arguments

    named = field_defaults(Path(arguments.__file__)) | field_defaults(trl / "trainer" / "model_config.py")
    named |= field_defaults(trl / "trainer" / "base_config.py") | field_defaults(trl / "trainer" / "grpo_config.py")
    named |= field_defaults(trl / "scripts" / "grpo.py") | field_defaults(trl / "scripts" / "utils.py")
    ppo = field_defaults(trl_ppo / "experimental" / "ppo" / "ppo_config.py")
    named |= {key: value for key, value in ppo.items() if key not in named}
    named |= dict.fromkeys(("dataset_num_proc", "num_processes"), UNKNOWN)
    write("trl", "TRL 1.16.0, with transformers' TrainingArguments", {key: value for key, value in named.items() if key.islower()})
    commands = accelerate / "commands"
    launched = dict(flags(commands / "launch.py")) | field_defaults(commands / "config" / "config_args.py")
    launched |= dict.fromkeys((*TORCHRUN, *DEEPSPEED), UNKNOWN) | BUFFERS
    plain = {key: launched[key] for key in launched if "-" not in key}
    write("accelerate", "accelerate launch 1.15.0 and its file, torchrun, deepspeed", plain)
    write("openrlhf", "OpenRLHF 0.11.2", dict(flags(openrlhf / "cli" / "train_ppo_ray.py")))
    earlier: dict[str, Any] = {}
    for folder in old:
        earlier |= dict(flags(folder / "cli" / "train_ppo_ray.py"))
    write("openrlhf_old", "OpenRLHF 0.5.9 to 0.9.10, defaults of the last that has them", earlier)
    examples = nemo / "examples" / "configs"
    first = [examples / "grpo_math_1B.yaml", examples / "ppo_math_1B.yaml"]
    files = {file for file in examples.rglob("*.yaml") if "evals" not in file.parts}
    write("nemo_rl", "NeMo-RL 0.7.0", yaml_keys([*first, *sorted(files - set(first))], 2))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
