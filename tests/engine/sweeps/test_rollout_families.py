"""The trainer's weights in vLLM, of families with biases, norms and stretched positions."""

from test_rollout import check_families


def test_the_trainers_weights_give_its_own_log_probs_in_vllm(tmp_path):
    check_families(tmp_path, (("qwen2", "packed", "pp2", 2), ("qwen3", "shared", "tp2", 1), ("llama3", "shared", "dp2", 1)))
