"""Adapters of low rank in real vLLM against transformers with W + scale B A in the place of W: one slot, two, none, rewritten."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expect import refuses
from spawn import run
from test_rollout import NEVER, PROMPTS, at, change, check_parity, draw, log_probs, make, push

from hfsdk.core.errors import OptionError
from hfsdk.core.lora import A, AdapterSpec, B, LoRA
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Ragged
from hfsdk.engine.generation.lora import padded_rank, slot_numbers, slots_of
from hfsdk.engine.generation.scoring import Sequences
from hfsdk.resharding.boxes import vllm_boxes

LINEAR = LoRA(rank=8, alpha=24.0)
SOME = LoRA(rank=4, alpha=4.0, targets=("q_proj", "v_proj", "up_proj"))
SIZES = {
    "vocab_size": 260, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: folder} of models whose logits are far from flat."""
    import transformers

    made = {}
    for family, kind, more in (
        ("llama", "Llama", {"head_dim": 32, "tie_word_embeddings": True}),
        ("phi3", "Phi3", {"pad_token_id": 0, "hidden_size": 256}),
    ):
        torch.manual_seed(3)
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES | more)).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8.0 if parameter.dim() == 2 else 1.0)
        made[family] = str(tmp_path_factory.mktemp(family))
        model.save_pretrained(made[family])
    return made


# --- helpers of the ranks ---------------------------------------------------------------------------------------------


def drawn(spec, lora, seed):
    """Adapters that change a model's log-probabilities a lot."""
    g = torch.Generator().manual_seed(seed)
    shapes = AdapterSpec.of(spec, lora).tensors()
    return {name: 0.15 * torch.randn(shape, generator=g) for name, shape in shapes.items()}


def write(rollout, lora, adapters, slot=0):
    targets = rollout.adapter_targets(slot)
    for box in vllm_boxes(AdapterSpec.of(rollout.spec, lora), rollout.tp, rollout.tp_rank):
        targets[box.local][at(box.local_start, box.size)].copy_(adapters[box.tensor][at(box.start, box.size)])
    rollout.finish_adapters(slot)


def base_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).float().eval()


def merged(folder, lora, adapters, weights=None):
    """The model with the adapters in its weights."""
    model = base_of(folder)
    if weights is not None:
        model.load_state_dict(weights.state_dict())
    with torch.no_grad():
        for name, a in adapters.items():
            if name.endswith(A):
                b = adapters[name.removesuffix(A) + B]
                model.get_parameter(name.removesuffix(A) + ".weight").add_(lora.scale * (b.double() @ a.double()).float())
    return model


def check_rows(rollout, models, adapter, group=None, prompts=PROMPTS):
    """Of a batch whose rows have one each of ``models``: every row is its own model's, and clearly none of the others'."""
    out = draw(rollout, prompts=prompts, group=group, adapter=adapter)
    far = []
    for i, model in enumerate(models):
        check_parity(model, {name: out[name].take([i]) for name in ("response", "rollout_log_probs")}, prompts=prompts.take([i]))
        for other in {id(m): m for m in models if m is not model}.values():
            expected = log_probs(other, prompts[i], out["response"][i])
            far.append(np.abs(out["rollout_log_probs"][i] - expected).max())
    assert not far or min(far) > 0.05
    return out


# --- one rank ---------------------------------------------------------------------------------------------------------


def one_rank(rank, world_size, folder):
    spec, base = ModelSpec.from_folder(folder), base_of(folder)
    for lora, mode in ((LINEAR, "packed"), (SOME, "shared")):
        rollout = make(folder, mode, lora=lora, adapters=2)
        ones, others = drawn(spec, lora, 1), drawn(spec, lora, 2)
        one, other = merged(folder, lora, ones), merged(folder, lora, others)
        check_refusals(rollout)
        alone = check_rows(rollout, [base] * 6, None)
        write(rollout, lora, ones)
        check_rows(rollout, [one] * 6, 0)
        for _ in range(2):  # the second time it is being written
            with refuses(RuntimeError, "slot 1 has no weights yet"):
                draw(rollout, adapter=[0, 1, 0, 1, 0, 1])
            rollout.adapter_targets(1)
        write(rollout, lora, others, 1)
        mixed = check_rows(rollout, [one, one, base, other, base, other], [0, 0, None, 1, None, 1])
        assert mixed["response"].take([2, 4]) == alone["response"].take([2, 4]), "whatever the others have"
        check_rows(rollout, [other] * 3 + [one] * 3, np.array([1, 1, 1, 0, 0, 0]))
        check_rows(rollout, [base] * 6, np.full(6, -1))
        check_scores(rollout, [one, other, base])
        check_written_again(rollout, lora, other, ones)
        check_memory(rollout, spec, lora)
        check_base_moves(rollout, folder, lora, ones)
        rollout.close()
        dist.barrier()


def check_refusals(rollout):
    with refuses(OptionError, "adapter 2", "0 to 1", "None"):
        draw(rollout, adapter=2)
    with refuses(RuntimeError, "has to follow adapter_targets"):
        rollout.finish_adapters()
    with refuses(OptionError, "slot 2", "has 2"):
        rollout.adapter_targets(2)


def check_scores(rollout, models):
    """Tokens that are there, under another adapter in each row."""
    responses = Ragged.of([np.arange(5) + i for i in range(3)], np.int32)
    prompts = PROMPTS.take([0, 0, 0])
    given = Sequences(prompts, responses, np.ones(3, np.float32), through_cache=[(1, 4)])
    found = rollout.score(NEVER, None, given, adapter=[0, 1, None])
    for i, model in enumerate(models):
        np.testing.assert_allclose(found.log_probs[i], log_probs(model, prompts[i], responses[i]), atol=1e-4, rtol=0)
    assert found.cached[1, 4] == pytest.approx(float(found.log_probs[1][4]), abs=1e-4)


def check_written_again(rollout, lora, other, ones):
    """A slot's new adapters are seen, cached prefixes of the old ones are not; the other slot stays."""
    halves = {name: 0.5 * tensor for name, tensor in ones.items()}
    blocks = Ragged.of([np.concatenate([row, row, row]) for row in PROMPTS], np.int32)  # the cache keeps whole ones of 32 tokens
    draw(rollout, prompts=blocks, adapter=0)
    write(rollout, lora, halves)
    with refuses(RuntimeError, "has to follow adapter_targets"):
        rollout.finish_adapters()
    folder = rollout._folder
    check_rows(rollout, [merged(folder, lora, halves)] * 3 + [other] * 3, [0, 0, 0, 1, 1, 1], prompts=blocks)
    readable = rollout.readable_adapters()
    for box in vllm_boxes(AdapterSpec.of(rollout.spec, lora), 1, 0):
        factor = lora.scale if box.tensor.endswith(B) else 1.0
        expected = factor * halves[box.tensor][at(box.start, box.size)]
        torch.testing.assert_close(readable[box.local][at(box.local_start, box.size)], expected)


def check_memory(rollout, spec, lora):
    slots = 2 * slot_numbers(spec, lora, 1, 0) * 4
    layers = rollout._model.parameters()
    assert rollout._adapters.num_bytes == slots > 0
    assert rollout.memory_bytes() >= slots + rollout.kv_cache_bytes + sum(p.nbytes for p in layers)


def check_base_moves(rollout, folder, lora, ones):
    """The base's weights are written as ever, under the names of a model without adapters."""
    model = base_of(folder)
    change(model)
    push(rollout, model)
    write(rollout, lora, ones)
    check_rows(rollout, [model] * 3 + [merged(folder, lora, ones, model)] * 3, [None, None, None, 0, 0, 0])


def half_precision(rank, world_size, folder):
    """bfloat16: what is written is multiplied by the scale with one rounding, and the padding of rank 4 to 8 stays zero."""
    spec, lora = ModelSpec.from_folder(folder), LoRA(rank=4, alpha=12.0)
    rollout = make(folder, "packed", lora=lora, dtype="bf16")
    ones = drawn(spec, lora, 1)
    write(rollout, lora, ones)
    for box in vllm_boxes(AdapterSpec.of(spec, lora), 1, 0):
        factor = lora.scale if box.tensor.endswith(B) else 1.0
        expected = (factor * ones[box.tensor].bfloat16().float()).bfloat16()[at(box.start, box.size)]
        assert torch.equal(rollout.readable_adapters()[box.local][at(box.local_start, box.size)], expected)
    whole, own = (sum(int(t.count_nonzero()) for t in found) for found in (rollout._adapters._stacks(), ones.values()))
    assert own * 0.99 < whole <= own
    out = draw(rollout)
    check_parity(merged(folder, lora, ones), out, tolerance=1.5)
    check_after_sleep(rollout, lora, ones, out)
    rollout.close()


def check_after_sleep(rollout, lora, ones, before):
    """A slot whose memory was given up comes back with anything in it, in its padding too: it is refused until it is written."""
    rollout._adapters.forget()
    for stack in rollout._adapters._stacks():
        stack.fill_(float("nan"))
    assert rollout.readable_adapters() == {}
    with refuses(RuntimeError, "slot 0 has no weights yet"):
        draw(rollout)
    write(rollout, lora, ones)
    assert np.array_equal(draw(rollout)["rollout_log_probs"].flat, before["rollout_log_probs"].flat)


# --- two ranks --------------------------------------------------------------------------------------------------------


def two_ranks(rank, world_size, folders):
    """tp2: B is cut with the rows of the weight, A with its columns; of a family whose files fuse queries, keys and values too."""
    group, drawn_tokens = dist.new_group([0, 1]), []
    for family, mode, lora in (("llama", "packed", SOME), ("phi3", "shared", LINEAR)):
        folder = folders[family]
        spec, base = ModelSpec.from_folder(folder), base_of(folder)
        rollout = make(folder, mode, rank, world_size, 2, lora=lora, adapters=2)
        assert rollout._adapters.num_bytes == 2 * 4 * slot_numbers(spec, lora, 2, rank)
        ones, others = drawn(spec, lora, 1), drawn(spec, lora, 2)
        write(rollout, lora, ones, 1)
        write(rollout, lora, others, 0)
        one, other = merged(folder, lora, ones), merged(folder, lora, others)
        out = check_rows(rollout, [one, base, other, one, other, base], [1, None, 0, 1, 0, None], group)
        drawn_tokens.append(out["response"].flat)
        rollout.close()
        dist.barrier()
    return drawn_tokens


# --- tests ------------------------------------------------------------------------------------------------------------


def one_process(rank, world_size, folders):
    one_rank(rank, world_size, folders["llama"])
    half_precision(rank, world_size, folders["llama"])


def test_one_rank(folders):
    run(one_process, 1, folders)


def test_two_ranks(folders):
    first, second = run(two_ranks, 2, folders)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_ranks_and_slots():
    assert [padded_rank(rank) for rank in (1, 2, 8, 9, 257, 512)] == [1, 8, 8, 16, 320, 512]
    assert slots_of([None, -1, 1], 3, 2) == [-1, -1, 1]
    with refuses(OptionError, "3 rows", "2 adapters"):
        slots_of([0, 0], 3, 1)
