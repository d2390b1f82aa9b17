"""Names that people bring along from TRL, transformers, verl and torch, and where hfsdk has the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hfsdk.core.rules import shown
from hfsdk.core.text import nearest

ARGUMENTS = {
    "max_new_tokens": "max_tokens max_length max_completion_length max_response_length response_length",
    "max_model_len": "max_length max_seq_len max_seq_length context_length",
    "n": "num_return_sequences num_generations n_samples num_samples n_samples_per_prompt rollout_n group_size",
    "epochs": "num_epochs ppo_epochs num_ppo_epochs num_iterations",
    "steps": "max_steps num_steps total_steps training_steps",
    "prompts": "dataset train_dataset data texts",
    "prompt_tokens": "prompt_length max_prompt_length",
    "response_tokens": "response_length max_response_length max_new_tokens",
    "max_prompt_tokens": "max_prompt_length prompt_length truncation",
    "lr": "learning_rate",
    "warmup_steps": "num_warmup_steps",
    "total_steps": "num_training_steps",
    "max_grad_norm": "grad_clip clip_grad gradient_clipping max_norm",
    "schedule": "lr_scheduler lr_scheduler_type scheduler",
    "betas": "beta1 beta2 adam_beta1 adam_beta2",
    "eps": "epsilon adam_epsilon",
    "cluster": "devices hardware gpus",
    "devices": "num_gpus gpus n_gpus num_devices num_workers world_size device",
    "model": "model_name model_name_or_path pretrained checkpoint policy",
    "source": "reward_funcs reward_fn function fn reward_func dataset data texts",
    "folder": "output_dir save_dir checkpoint_dir save_directory directory",
    "save_every": "save_steps save_freq save_interval checkpoint_every",
    "keep": "save_total_limit",
    "resume": "resume_from_checkpoint checkpoint load_from",
    "track": "report_to logger log_with",
    "progress": "verbose disable_tqdm",
    "mini_batches": "num_mini_batches",
    "micro_batch_tokens": "micro_batch_size ppo_micro_batch_size",
    "recompute": "gradient_checkpointing activation_checkpointing",
    "dtype": "torch_dtype precision bf16 fp16",
    "column": "text_column prompt_column dataset_text_field field",
    "batch_size": "per_device_train_batch_size train_batch_size",
    "tp": "tensor_parallel tensor_parallel_size tp_size",
    "pp": "pipeline_parallel pipeline_parallel_size pp_size",
    "dp": "data_parallel data_parallel_size dp_size num_replicas",
    "ep": "expert_parallel expert_parallel_size expert_model_parallel_size ep_size",
    "cp": "context_parallel context_parallel_size ulysses_sequence_parallel_size cp_size",
}  # fmt: skip
"""hfsdk's name of an argument of its functions -> its names elsewhere."""

_OPTIMIZER = "it belongs to the model's optimizer: optimizer=hf.AdamW(lr=1e-5)"
_LAYOUT = "a layout is a text: train='tp2 dp2', rollout='tp2'"
ELSEWHERE = {
    "lr learning_rate weight_decay max_grad_norm betas": _OPTIMIZER,
    "tp pp dp tensor_parallel tensor_parallel_size tensor_model_parallel_size pipeline_parallel_size": _LAYOUT,
    "num_gpus n_gpus": "devices are the session's: hf.Session(devices=2), or hf.Session.simulated('1x2 A100-80GB')",
    "report_to logger log_with": "it belongs to the loop: session.train(..., track='wandb')",
    "logging_steps logging_strategy log_interval logging_first_step": "every step is kept: run.history, session.history",
    "save_steps save_freq save_strategy output_dir": "it belongs to the loop: session.train(..., folder='runs/a', save_every=10)",
    "gradient_accumulation_steps": (
        "an optimizer step is a mini-batch, hf.GRPO(mini_batches=2); how much of it is computed at once belongs to the role: "
        "session.actor(model, micro_batch_tokens=4096)"
    ),
    "use_vllm vllm_mode vllm_gpu_memory_utilization gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_len": (
        "vLLM always generates, on the actor's devices: session.actor(model, rollout='tp2', rollout_options=hf.RolloutOptions(...))"
    ),
    "bf16 fp16 torch_dtype": "what a model computes in is its declaration's: session.actor(model, dtype='bf16')",
    "gradient_checkpointing": "it belongs to the role: session.actor(model, recompute='full')",
    "lr_scheduler_type lr_scheduler": "it belongs to the model's optimizer: optimizer=hf.AdamW(lr=1e-5, schedule='cosine')",
    "reward_weights": "they belong to the reward: session.reward([f, g], weights=[1.0, 0.5])",
    "run_name": "it belongs to the tracker: session.train(..., track=hf.WandB(name='a run'))",
    "steps_per_generation num_iterations": "a batch is learned from epochs times: hf.GRPO(epochs=2, mini_batches=4)",
    "compute_metrics": (
        "metrics=[f] has f(batch) of each training batch; held-out prompts are measured by session.evaluate(held_out), "
        "or by keep_best=hf.KeepBest(held_out)"
    ),
    "peft_config use_peft lora lora_config lora_rank lora_r lora_alpha": (
        "it belongs to the model: session.actor(model, lora=hf.LoRA(rank=16))"
    ),
    "num_generations group_size": "it belongs to the algorithm: hf.GRPO(n=8)",
    "seed": "it belongs to the session: hf.Session(seed=0)",
    "epochs num_epochs num_train_epochs": "one pass over the data is len(prompts) steps: steps=3 * len(prompts)",
    "eval_dataset eval_steps eval_strategy load_best_model_at_end metric_for_best_model": (
        "held-out prompts are measured by keep_best=hf.KeepBest(held_out, every=10), or by session.evaluate(held_out)"
    ),
    "callbacks callback": (
        "stop=f is called with every step's row, and metrics=[f] with its batch; session.subscribe(f) hears every call"
    ),
    "do_sample": "temperature=0 takes the likeliest token, any other samples",
    "eos_token_id pad_token_id tokenizer processing_class": "the tokenizer is that of the actor's model folder",
    "args config training_args": "options are those of the algorithm: hf.PPO(clip=0.2), and of session.train itself",
    "reward_funcs reward_fn reward_model": "the reward is a role of the session: session.reward(my_function)",
    "ref_model reference": "the reference is a role of the session: session.reference(actor)",
    "beta kl_coef clip epsilon gamma": "it belongs to the algorithm: hf.PPO(kl_coef=0.05)",
    "max_new_tokens max_tokens max_completion_length temperature": (
        "it belongs to the algorithm: hf.PPO(max_new_tokens=64, temperature=1.0)"
    ),
    "min_p typical_p top_a epsilon_cutoff eta_cutoff repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size "
    "logit_bias bad_words bad_words_ids suppress_tokens allowed_token_ids logits_processor logits_processors": (
        "there is none: hfsdk draws by temperature, top_k, top_p, min_new_tokens, and by nothing else, as every log-prob pass of "
        "the trainer has to be of the distribution that was drawn from"
    ),
    "num_beams num_beam_groups length_penalty early_stopping best_of use_beam_search": (
        "there is no beam search: what is learned from is drawn, n responses each, or the likeliest tokens with temperature=0"
    ),
    "warmup_ratio": "warm-up is counted in steps: warmup_steps=10",
    "batch_size per_device_train_batch_size": (
        "it belongs to the prompts: session.prompts(data, batch_size=32), or of a planned step hf.Workload(prompts=32)"
    ),
    "cuda gpu device device_map": "devices are the session's: hf.Session(devices=2)",
}  # fmt: skip
"""Names that are no argument here -> where to find the same."""


def unknown_name(
    what: str, name: str, existing: Collection[str], others: Mapping[str, str], elsewhere: Mapping[str, str], kind: str = "option"
) -> str:
    """Return the message on an option or argument that does not exist.

    Args:
        what: the algorithm, loss or function, as the user calls it.
        name: the name that the user wrote.
        existing: the names that exist.
        others: hfsdk's name -> its names elsewhere, divided by spaces.
        elsewhere: names divided by spaces -> where in hfsdk that is.
        kind: the noun for it in the message.
    """
    lowered = name.lower()
    ours = [option for option, names in others.items() if lowered in names.split()]
    here = [option for option in ours if option in existing]
    where = next((said for names, said in elsewhere.items() if lowered in names.split()), "")
    if here:
        said = f"hfsdk calls it {here[0]}: {what}({here[0]}=...)"
    elif where:
        said = where
    elif ours and kind == "option":
        said = f"hfsdk calls it {ours[0]}, which is no option of {what}; here are {', '.join(existing)}"
    else:
        said = nearest(name, existing)
    return f"{what} has no {kind} {shown(name)}; {said}"
