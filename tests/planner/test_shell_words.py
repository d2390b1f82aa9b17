"""A script's words are those that bash would give its job, or keep the variable that only a run knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from expect import each

import hfsdk as hf
from hfsdk.configs.command_line import words_of_script

SHOW = "show() { printf '%s\\0' \"$@\"; }\n"


def of_bash(script: str) -> list[str]:
    """What bash gives to the script's command ``show``, without arguments and with an environment of a home alone."""
    run = subprocess.run(["bash", "-c", SHOW + script], env={"HOME": str(Path.home())}, capture_output=True, check=True, text=True)
    return run.stdout.split("\0")[:-1]


def of_hfsdk(script: str) -> tuple[list[str], dict[str, str]]:
    """The words of the last ``show``, and the defaults that were taken."""
    lines, defaults = words_of_script(script)
    line = [line for line in lines if "show" in line][-1]
    first = len(line) - line[::-1].index("show")
    return line[first : line.index(";", first)], defaults


@each(
    "script",
    [
        "show a=1 'b c' \"d e\" f\\ g",
        'A=3\nshow $A ${A} "$A" \'$A\' \\$A "\\$A" x${A}y',
        'A=\'two words\'\nshow "$A" $A x="$A"y',
        "A=1 B=2; C=$A$B\nshow $C",
        "export A=4\ndeclare -i B=5\nreadonly C=6\nshow $A $B $C",
        "A=1 && export B=2 && show $A $B",
        "set -e && A=1\nshow $A",
        "N=8\nshow $((N * 2)) $(( $N + 1 )) $(((N + 2) / 3)) $((10 % 4)) $((-3))",
        'show ${A:-5} ${A-6} "${A:-a b}" ${1:-7}',
        "A=\nshow x${A:-5} x${A-6}",
        ": ${A:=9}\nshow $A",
        'R=/data\nM=${M:-"${R}/models/x"}\nshow m=$M "n=${N:-"${R}/y"}"',
        "show $HOME/models ${HOME}/models",
        'ARGS=(\n  a=1  # a size\n  \'b c\'\n  "d=$HOME"\n)\nARGS+=(e=2)\nshow first "${ARGS[@]}" last',
        "ARGS=(a b)\nshow ${ARGS[@]} $ARGS",
        "A=1\nA=2\nA+=3\nshow $A",
        "N=2\nread -r -d '' ARGS <<EOF\n-m a.b \\\n  --n $N --text \"two words\"\nEOF\nshow $N $ARGS",
        "read -r -d '' ARGS <<'EOF'\n--n $N\nEOF\nshow x $ARGS",
        "cat > /dev/null <<EOF\nA=7 'open\nEOF\nA=1\nshow $A",
        "show a \\\n  b \\\n  c > /dev/stderr; show a b c",
        "show a 2>&1  # and more",
        "A='#1'\nshow $A x#y",
        'J=\'{"a": 1}\'\nshow j="$J"',
        'show a "$@" b $*',
        'Q="it\'s"\nshow "$Q"',
        "A='$B'\nB=1\nshow $A \"$A\"",
    ],
)
def test_words_are_bashs(script):
    words, _ = of_hfsdk(script)
    assert words == of_bash(script)[-len(words) :]


@each(
    "script",
    [
        "show $A",
        "A=$B\nshow $A",
        "A=$(nproc)\nshow $A",
        "A=`nproc`\nshow $A",
        "if [ -f x ]; then A=1; fi\nshow $A",
        "A=1\nif [ -f x ]\nthen\n  A=2\nfi\nshow $A",
        "[ -f x ] && A=1\nshow $A",
        "A=1\nfalse || A=2\nshow $A",
        "for A in 1 2; do B=$A; done\nshow $A",
        "f() {\n  A=1\n}\nshow $A",
        "f() { A=1; }\nshow $A",
        "case x in\n  x) A=1 ;;\nesac\nshow $A",
        "A=1 true\nshow $A",
        "A=8\nshow ${A%8}",
        "A=x\nshow $((A * 2))",
        "show $((1 / 0))",
        "show $((2 ** 9999999))",
    ],
)
def test_what_only_a_run_knows_stays_as_it_is_written(script):
    words, defaults = of_hfsdk(script)
    assert "$" in " ".join(words)
    assert defaults == {}


def test_a_value_that_doubles_in_each_line_ends():
    script = "A=x\n" + "A=$A$A\n" * 100 + "show $A"
    words, _ = of_hfsdk(script)
    assert words == ["$A"]


JOB = """#!/bin/bash
set -x
NNODES=${NNODES:-2}
GPUS=8
n_resp_per_prompt=16
offload=True
model_path=$DATA_HOME/models/Qwen2.5-7B
python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
DATA=(
    data.train_batch_size=$((64 * GPUS))   # prompts
    data.max_prompt_length=1024
    data.max_response_length=$((1024 * 2))
)
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    "${DATA[@]}" \\
    actor_rollout_ref.model.path="${model_path}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=${MINI:-256} \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=$n_resp_per_prompt \\
    trainer.n_gpus_per_node=$GPUS \\
    trainer.nnodes=$NNODES "$@"
"""


def test_a_script_is_explained_by_what_it_gives_its_variables():
    explained = hf.explain(JOB)
    assert explained["samples"] == 512 * 16
    assert explained.cluster is not None
    assert str(explained.cluster) == "2x8 H100"
    assert {name: words.split(",")[0] for name, words in explained.assumed.items() if name.startswith("$")} == {
        "$NNODES": "2", "$MINI": "256",
    }  # fmt: skip


def test_what_the_script_leaves_to_its_environment_is_refused_by_key():
    with pytest.raises(hf.OptionError, match=r"trainer\.nnodes is '\$NNODES', which a shell would work out"):
        hf.explain(JOB.replace("NNODES=${NNODES:-2}\n", ""))


def test_what_a_launcher_runs_from_a_variable_says_whose_it_is():
    body = "openrlhf.cli.{0} \\\n  --pretrain Qwen/Qwen2.5-7B"
    script = f"read -r -d '' commands <<EOF\n{body}\nEOF\ndeepspeed --module $commands\n"
    with pytest.raises(hf.OptionError, match="OpenRLHF's SFT, DPO or reward models, which is not read"):
        hf.explain(script.format("train_sft"))
    two = "python a/prepare.py --n 1\npython -m verl.trainer.{0} model.partial_pretrain=x\npython b.py --n 2\n"
    with pytest.raises(hf.OptionError, match="verl's SFT, which is not read"):
        hf.explain(two.format("fsdp_sft_trainer"))


@each(
    "script, named",
    [("A=" + "$((" * 20_000, "20,000"), ("A='" + "x\n" * 30_000, "500 lines"), ("A=(\n" + "x\n" * 30_000, "500 lines")],
)
def test_a_script_that_would_be_cut_for_hours_is_refused(script, named):
    with pytest.raises(hf.OptionError, match=named):
        words_of_script(script)
