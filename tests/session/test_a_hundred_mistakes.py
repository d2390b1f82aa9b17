"""A hundred mistakes of a first hour, each with the words that say the cure; nothing of the session is harmed by one.

On a simulated session, where a mistake costs milliseconds. ``it`` is the world of :func:`world`: a session with every role (``s``),
its prompts (``p``), a batch with responses (``b``), the handles, and a session without roles (``empty``).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import hfsdk as hf
from hfsdk.algorithms import ppo
from hfsdk.session.session_parts import parts_of


def loss(out, b):
    return -out.log_probs


def nothing(table):
    return {}


def length(completions):
    return [float(len(text)) for text in completions]


def made():
    session = hf.Session.simulated("1x4 A100-80GB")
    actor = session.actor("tiny")
    critic, reference, reward = session.critic("tiny"), session.reference(actor), session.reward(length)
    prompts = session.prompts(["one", "two", "three", "four"], batch_size=2)
    batch = actor.generate(prompts[0], max_new_tokens=4).wait()
    return SimpleNamespace(s=session, p=prompts, b=batch, actor=actor, critic=critic, reference=reference, reward=reward)


@pytest.fixture
def it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = made()
    world.empty = hf.Session.simulated("1x4 A100-80GB")
    yield world
    world.s.close(), world.empty.close()


SHORT = hf.PPO(max_new_tokens=4)

TRLS_WORDS = [
    (lambda it: hf.PPOTrainer, r"a session trains: session\.train\(hf\.PPO\(\), prompts, steps=50\)"),
    (lambda it: hf.GRPOConfig, r"options are an algorithm's, e\.g\. hf\.PPO\(clip=0\.2\), or a model's"),
    (lambda it: hf.AutoModelForCausalLMWithValueHead, r"values come from a model of their own: session\.critic\(model\)"),
    (lambda it: hf.PPO(learning_rate=1e-5), r"it belongs to a model's optimizer: session\.actor\(model, optimizer=hf\.AdamW"),
    (lambda it: hf.PPO(beta=0.1), r"hfsdk calls it kl_coef: PPO\(kl_coef=\.\.\.\)"),
    (lambda it: hf.PPO(cliprange=0.2), r"hfsdk calls it clip: PPO\(clip=\.\.\.\)"),
    (lambda it: hf.PPO(ppo_epochs=4), r"hfsdk calls it epochs"),
    (lambda it: hf.PPO(max_tokens=32), r"hfsdk calls it max_new_tokens"),
    (lambda it: hf.PPO(batch_size=32), r"it belongs to the prompts: session\.prompts\(data, batch_size=32\)"),
    (lambda it: hf.PPO(seed=1), r"it belongs to the session: hf\.Session\(seed=0\)"),
    (lambda it: hf.GRPO(num_generations=8), r"hfsdk calls it n: GRPO\(n=\.\.\.\)"),
    (lambda it: hf.GRPO(num_train_epochs=1), r"one pass over the data is len\(prompts\) steps"),
    (lambda it: hf.GRPO(report_to="wandb"), r"it belongs to the loop: session\.train\(\.\.\., track='wandb'\)"),
    (lambda it: hf.GRPO(output_dir="runs"), r"it belongs to the loop: session\.train\(\.\.\., folder='runs/a', save_every=10\)"),
    (lambda it: hf.GRPO(ref_model=None), r"the reference is a role of the session: session\.reference\(actor\)"),
    (lambda it: hf.GRPO(gradient_accumulation_steps=4), r"hf\.GRPO\(mini_batches=2\).*micro_batch_tokens=4096"),
    (lambda it: hf.GRPO(epsilon=0.2), r"TRL's epsilon=0\.2 is clip=0\.2 here"),
    (lambda it: hf.GRPO(aggregation="dr_grpo"), r"TRL's aggregation='dr_grpo' is aggregation='fixed_length' here"),
    (lambda it: hf.GRPO(scale=False), r"TRL's scale=False is scale='none' here"),
    (lambda it: hf.DPO(max_length=512), r"of pairs hfsdk calls it max_tokens: session\.pairs\(data, max_tokens=512\)"),
    (lambda it: hf.SFTTrainer, r"it is a loss: actor\.update\(batch, hf\.CrossEntropy\(\)\)"),
    (lambda it: hf.LoraConfig, r"hf\.LoRA\(rank=16, alpha=32\), given as session\.actor"),
    (lambda it: it.s.actor("tiny", use_vllm=True), r"vLLM always generates.*rollout_options=hf\.RolloutOptions"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, num_generations=8), r"it belongs to the algorithm: hf\.GRPO\(n=8\)"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, logging_steps=1), r"every step is kept: run\.history"),
    (lambda it: hf.DPO(loss_type="sigmoid"), r"hfsdk calls it kind: DPO\(kind=\.\.\.\)"),
    (lambda it: hf.AdamW(learning_rate=1e-4), r"hfsdk calls it lr: AdamW\(lr=\.\.\.\)"),
    (lambda it: hf.AdamW(warmup_ratio=0.1), r"warm-up is counted in steps: warmup_steps=10"),
    (lambda it: ppo.advantages(it.b, gae_lambda=0.9), r"hfsdk calls it lam: advantages\(lam=\.\.\.\)"),
    (lambda it: ppo.PolicyLoss(epsilon=0.2), r"hfsdk calls it clip: PolicyLoss\(clip=\.\.\.\)"),
    (lambda it: hf.Session(num_gpus=2), r"hfsdk calls it devices: Session\(devices=\.\.\.\)"),
    (lambda it: it.s.actor("tiny", lr=1e-5), r"it belongs to the model's optimizer: optimizer=hf\.AdamW\(lr=1e-5\)"),
    (lambda it: it.s.actor("tiny", tensor_parallel_size=2), r"a layout is a text: train='tp2 dp2', rollout='tp2'"),
    (lambda it: it.s.actor("tiny", device_map="auto"), r"devices are the session's: hf\.Session\(devices=2\)"),
    (lambda it: it.actor.generate(it.p[0], max_length=8), r"hfsdk calls it max_new_tokens"),
    (lambda it: it.actor.generate(it.p[0], do_sample=False), r"temperature=0 takes the likeliest token"),
    (lambda it: it.actor.generate(it.p[0], num_return_sequences=4), r"hfsdk calls it n"),
    (lambda it: it.s.train(SHORT, it.p, max_steps=3), r"hfsdk calls it steps: Session\.train\(steps=\.\.\.\)"),
    (lambda it: it.s.train(SHORT, it.p, num_train_epochs=3), r"one pass over the data is len\(prompts\) steps"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, callbacks=[]), r"stop=f is called with every step's row"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, reward_funcs=length), r"a role of the session: session\.reward\(my_function\)"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, args=None), r"options are those of the algorithm"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, save_steps=10), r"hfsdk calls it save_every"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, report_to="wandb"), r"hfsdk calls it track"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, compute_metrics=length), r"metrics=\[f\] has f\(batch\) of each training batch"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, run_name="a"), r"it belongs to the tracker"),
    (lambda it: hf.GRPO(bf16=True), r"session\.actor\(model, dtype='bf16'\)"),
    (lambda it: hf.GRPO(gradient_checkpointing=True), r"session\.actor\(model, recompute='full'\)"),
    (lambda it: hf.GRPO(reward_weights=[1.0]), r"session\.reward\(\[f, g\], weights="),
    (lambda it: hf.GRPO(lr_scheduler_type="cosine"), r"hf\.AdamW\(lr=1e-5, schedule='cosine'\)"),
    (lambda it: hf.GRPO(max_prompt_length=64), r"session\.prompts\(data, max_prompt_tokens=64\)"),
    (lambda it: it.s.evaluate(it.s.pairs({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})), r"evaluate takes prompts"),
    (lambda it: hf.Workload(batch_size=32), r"hf\.Workload\(prompts=32\)"),
    (lambda it: hf.Layout(tensor_parallel=2), r"hfsdk calls it tp: Layout\(tp=\.\.\.\)"),
]

WRONG_VALUES = [
    (lambda it: hf.Session.simulated("8xH100"), r"write nodes x devices and a device name, e\.g\. '16x8 A100-80GB'"),
    (lambda it: hf.Session.simulated("1x8 H1000"), r"did you mean 'H100'"),
    (lambda it: hf.Session.simulated(8), r"cluster must be a text or an hf\.ClusterSpec; got cluster=8"),
    (lambda it: hf.Session.simulated("0x8 H100"), r"0 nodes of 8; give at least one of each"),
    (lambda it: hf.Session.simulated("1x1 H100", wait="yes"), r"wait must be True or False"),
    (lambda it: hf.Session(devices=0), r"devices is a number of at least 1, 'auto', or the address of a Ray cluster"),
    (lambda it: hf.Session(devices=[0, 1]), r"devices must be a whole number or a text"),
    (lambda it: it.s.actor("tinny"), r"did you mean 'tiny'\?"),
    (lambda it: it.s.actor("/no/such/folder"), r"there is no such folder\. Models that need no hub: tiny"),
    (lambda it: it.s.actor("tiny", name="my actor"), r"a role's name has letters, digits"),
    (lambda it: it.s.actor("tiny", optimizer="adam"), r"optimizer must be an hf\.AdamW; got optimizer='adam'"),
    (lambda it: it.s.actor("tiny", dtype="float16"), r"dtype must be one of 'fp32', 'bf16'"),
    (lambda it: hf.AdamW(lr="1e-5"), r"lr must be a finite number of at least 0 or None; got lr='1e-5'"),
    (lambda it: hf.AdamW(1e-5), r"AdamW takes its options by name: lr=\.\.\."),
    (lambda it: hf.AdamW(betas=0.9), r"betas must be a tuple of 2 numbers"),
    (lambda it: hf.AdamW(schedule="cosin"), r"schedule must be one of 'constant', 'linear', 'cosine'"),
    (lambda it: hf.PPO(max_new_token=8), r"did you mean 'max_new_tokens'\?"),
    (lambda it: hf.PPO(gamma=1.5), r"gamma must be a number from 0 to 1"),
    (lambda it: hf.PPO(mini_batches=1.5), r"mini_batches must be a whole number"),
    (lambda it: hf.PPO(temperature=-1), r"temperature must be a number above 0 and at most 2"),
    (lambda it: hf.GRPO(temperature=3.0), r"temperature must be a number above 0 and at most 2; got temperature=3"),
    (lambda it: hf.GRPO(n=1), r"n must be at least 2 \(responses are compared with others to their prompt\)"),
    (lambda it: it.actor.generate(it.p[0], max_new_tokens=0), r"max_new_tokens must be a whole number from 1"),
    (
        lambda it: it.actor.generate(it.p[0], max_new_tokens=4000),
        r"the context of tiny is 512\. Shorten the prompt .*lower max_new_tokens",
    ),
    (lambda it: it.actor.generate(it.p[0], temperature=2.5), r"temperature must be at most 2, as vLLM has it; got 2.5"),
    (lambda it: it.actor.generate(it.p[0], temperature="hot"), r"temperature must be a finite number of at least 0"),
    (lambda it: it.actor.generate(it.p[0], top_p=2), r"top_p must be a number from 0 to 1"),
    (lambda it: it.s.train(SHORT, it.p, steps="10"), r"steps must be a whole number from 1"),
    (lambda it: it.s.train(SHORT, it.p, 10), r"give the others by name: steps=\.\.\."),
    (
        lambda it: it.s.train(SHORT, it.p, steps=1, metrics=[3]),
        r"metrics must be a list of functions of 1 argument; got metrics\[0\]=3",
    ),
    (lambda it: it.s.train(SHORT, it.p, steps=1, stop=5), r"stop must be a function of 1 argument"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, track="wandbb"), r"track knows 'tensorboard', 'wandb', 'mlflow'"),
    (lambda it: it.s.train(hf.PPO(mini_batches=64), it.p, steps=1), r"mini_batches must be at most 2, the batch's samples"),
    (lambda it: it.s.compare([SHORT], it.p, steps=1, seeds=3), r"seeds must be a list of whole numbers"),
    (lambda it: it.s.compare(SHORT, it.p, steps=1), r"algorithms must be a list or a mapping"),
    (lambda it: it.s.compare([SHORT, SHORT], it.p, steps=1), r"two of the algorithms are the same.*name them: \{'one': \.\.\.,"),
    (lambda it: it.s.report("report.pdf"), r"a report is an \.html file in a folder that exists"),
    (lambda it: it.s.evaluate(it.p, num_prompts=0), r"num_prompts must be a whole number from 1"),
]

LAYOUTS_AND_PLACES = [
    (lambda it: it.s.actor("tiny", train="tp3"), r"tiny has 8 attention heads, 4 kv heads .*: 1, 2, 4, 8; got tp=3"),
    (lambda it: it.s.actor("tiny", rollout="pp2"), r"the generating engine runs tp and dp only"),
    (lambda it: it.s.actor("tiny", train="tp2 xx2"), r"does not parse at 'xx2'; write e\.g\. 'tp2'"),
    (lambda it: it.s.actor("tiny", train=2), r"train must be a text or an hf\.Layout"),
    (
        lambda it: it.empty.actor("tiny", train="tp4 dp4") and it.empty.place(),
        r"needs 16 devices; the session has 4\. Use a smaller",
    ),
    (lambda it: hf.Layout(tp=0), r"tp must be a whole number from 1"),
    (lambda it: it.s.place("collocate"), r"did you mean 'colocate'\?"),
    (lambda it: it.s.place({"actor reference": 3, "critic": 3}), r"the session has 4 devices"),
    (lambda it: it.s.place({"actor": 4}), r"the placement forgets critic, reference; it places actor\. Name every role\."),
    (lambda it: it.s.place({"actr": 1, "critic reference": 1}), r"There is no role 'actr'; did you mean 'actor'"),
    (lambda it: it.s.place(4), r"what must be a text or a mapping"),
    (lambda it: it.empty.place(), r"declare some first, e\.g\. session\.actor\('tiny'\)"),
    (
        lambda it: it.s.plan(hf.PPO(), hf.Workload()),
        r"the context of tiny itself is 512.*hf\.Workload\(prompt_tokens=256, response_tokens=256",
    ),
    (lambda it: it.s.what_if(hf.PPO(), hf.Workload()), r"give a shorter workload, e\.g\. hf\.Workload\("),
    (lambda it: it.s.plan(hf.PPO, hf.Workload()), r"plan takes an algorithm with a method step, e\.g\. hf\.PPO\(\)"),
    (lambda it: it.s.plan(hf.PPO(), 1024), r"workload must be an hf\.Workload"),
]

ORDER_OF_CALLS = [
    (lambda it: it.actor.update(it.p[0], loss), r"reads 'response'.*Call actor\.generate\(batch\) first"),
    (lambda it: it.critic.compute_values(it.p[0]), r"Call actor\.generate\(batch\) first"),
    (lambda it: ppo.advantages(it.reward.compute_scores(it.b)), r"Call critic\.compute_values\(batch\) first"),
    (lambda it: it.actor.update(it.b, ppo.PolicyLoss()), r"'old_log_probs' .*Call actor\.compute_log_probs\(batch\) first"),
    (lambda it: it.actor.update(it.b, ppo.PolicyLoss), r"takes a loss, a function of \(out, b\).*ppo\.PolicyLoss\(clip=0\.2\)"),
    (lambda it: it.actor.update(it.b, hf.PPO()), r"loss must be a function"),
    (lambda it: it.actor.update(it.b, lambda out: out.log_probs), r"calls a loss with \(out, b\), .*not take these two"),
    (lambda it: it.actor.update(it.b, ppo.ValueLoss()), r"reads out\.values, and this .* has log_probs\. .* a critic"),
    (lambda it: it.critic.update(it.b, ppo.PolicyLoss()), r"reads out\.log_probs, .* has values\. .* an actor"),
    (lambda it: it.reward.compute_scores(it.b.with_columns(completions=["a", "b"])), r"a column 'completions' of its own; give"),
    (lambda it: setattr(it.s, "seed", -1), r"seed must be a whole number from 0"),
    (lambda it: setattr(it.s, "name", 3), r"name must be a text"),
    (lambda it: it.actor.generate(["\ud800"]), r"the prompt .* has lone surrogates .*'replace'"),
    (lambda it: it.s.prompts(["a\ud800"], batch_size=1), r"prompt 0 of the data has lone surrogates .*'replace'"),
    (lambda it: it.actor.update(it.p, loss), r"batch must be an hf\.Batch; got batch=PromptStream"),
    (lambda it: it.actor.update(it.b, loss, mini_batches=99), r"mini_batches must be at most 2, the batch's samples"),
    (lambda it: it.actor.update(made().b, loss), r"belongs to another session.*Bring them over by value"),
    (lambda it: it.b.join(made().b, x="response"), r"with_columns\(name=other\['name'\]\)"),
    (lambda it: it.reward.update(it.b, loss), r"reward is a function, not a model; it cannot be trained"),
    (lambda it: it.reward.run(print), r"reward is a function, not a model"),
    (lambda it: it.s.train(hf.PPO, it.p, steps=1), r"takes an algorithm with a step, e\.g\. hf\.PPO\(clip=0\.2\).* Write PPO\(\)"),
    (lambda it: it.s.train(hf.CrossEntropy(), it.p, steps=1), r"A loss is an update's: actor\.update\(batch, loss\)"),
    (lambda it: it.s.train(hf.DPO(), it.p, steps=1), r"session\.pairs"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, save_every=1), r"needs a folder to save to \(folder=\.\.\.\)"),
    (lambda it: it.s.train(SHORT, it.p, steps=1, resume="nowhere"), r"give a folder that session\.save\(folder\) finished"),
    (lambda it: it.s.load("/no/such"), r"there is no session\.json"),
    (lambda it: it.s.rewind("before"), r"the session has none; session\.snapshot\('before'\) takes one"),
    (lambda it: it.empty.snapshot(), r"no role is trained; call session\.actor\('tiny'\) first"),
    (lambda it: it.empty.watch(), r"session\.train\(hf\.PPO\(\), prompts, steps=50, wait=False\) starts one"),
    (lambda it: it.empty.predict(), r"Run a step first; .*session\.plan\(algorithm, workload\)"),
    (lambda it: it.s.train(SHORT, it.p, steps=1).resume(), r"goes with session\.train\(\.\.\., wait=False\)"),
    (
        lambda it: it.s.compare([SHORT], it.p, steps=1, baseline="b.json"),
        r"there is no baseline b\.json yet.*save_baseline=True writes it",
    ),
    (
        lambda it: it.critic.release() or it.critic.compute_values(it.b),
        r"was released; declare it again, e\.g\. session\.critic\('tiny'\)",
    ),
]

FUNCTIONS = [
    (lambda it: it.s.reward(lambda: 0.0), r"takes no completions.*def score\(prompts, completions, \*\*columns\)"),
    (lambda it: it.s.reward(lambda text, label: 0.0), r"or def score\(completions\); return one number per completion"),
    (lambda it: it.s.reward(0.5), r"source must be a path or a function"),
    (lambda it: it.s.reward(length(["a"])), r"source must be a path or a function .* got source\[0\]=1\.0"),
    (lambda it: it.s.reward([length, length], weights=[1.0]), r"a sum of rewards needs one finite weight for each"),
    (lambda it: it.s.reward(length, timeout_s=-1), r"timeout_s must be a finite number above 0"),
    (lambda it: it.actor.run("print"), r"fn must be a function; got fn='print'"),
    (lambda it: it.actor.call(lambda model, rows: {}, it.b), r"primitive must be an hf\.Primitive"),
    (lambda it: hf.primitive(loss), r"give the others by name: reads=\.\.\., writes=\.\.\., protocol=\.\.\."),
    (lambda it: it.b.map(nothing, reads="prompt", writes=["x"]), r"reads must be a list of texts; got reads='prompt'"),
    (lambda it: it.b.map(nothing, reads=["reward"], writes=["x"]), r"Write it first, e\.g\. with batch\.with_columns\(\.\.\.\)"),
    (lambda it: it.s.subscribe(print("")), r"listener must be a function of 1 argument; got listener=None"),
]

LOOKING = [
    (lambda it: it.b["respones"], r"the batch has no column 'respones'; it has prompt, position, response"),
    (lambda it: it.b[0], r"use batch\[0:0 \+ 1\] for rows or batch\.inspect\(0\) to look"),
    (lambda it: it.b["prompt", "response"], r"batch\.table\('prompt', 'response'\) brings several"),
    (lambda it: it.b.take([99]), r"row 99 does not exist; the batch has 2 samples \(0 to 1\)"),
    (lambda it: it.b.inspect(99), r"the batch has 2 samples \(0 to 1\)"),
    (lambda it: it.b[5:5], r"a batch needs at least one sample"),
    (lambda it: it.b.with_columns(mine=[1.0]), r"the batch has 2 samples\. Give one per sample\."),
    (lambda it: it.s.batch(prompt=[[1.5]]), r"holds token ids, which are whole numbers"),
    (lambda it: it.s.batch(prompt=[[1]], response=[[1], [2]]), r"give every column one entry per sample"),
    (lambda it: it.b["response"], r"was simulated and wrote shapes only.*batch\.column_states\(\)"),
    (lambda it: it.b.wait("soon"), r"timeout must be a number from 0"),
    (lambda it: it.s.trace[99], r"there is no step 99; the session has step 0 \(\[-1\] is the last\)"),
    (lambda it: it.s.trace[2:5], r"\[2:5\] has no step; the session has step 0"),
    (lambda it: it.s.trace["generate"], r"step must be a whole number or a slice"),
    (lambda it: it.s.dataflow[99], r"there is no step 99; the session has step 0"),
    (lambda it: it.s.dataflow[0:2], r"session\.trace\[2:5\] spans several steps"),
    (lambda it: it.s.dataflow.edge(1, 99), r"nothing flows from call 1 to call 99; edges: 1 -> 2"),
    (lambda it: it.s.trace.compare({"generat": 4.0}), r"which did not run; there are actor\.generate"),
    (lambda it: it.s.trace.to_perfetto("no/dir/x.json"), r"No such file or directory; what was there is unchanged"),
    (lambda it: it.s.logs("actr"), r"no role 'actr'; the session has actor, critic, reference, reward"),
    (lambda it: hf.viz.picture(3), r"there are of .*Comparison, Dataflow, .*and of what a session shows"),
]

CLOSED = [
    (
        lambda it: it.s.train(SHORT, it.p, steps=1),
        r"make a new one with hf\.Session\(\.\.\.\)\. What this one measured stays readable",
    ),
    (lambda it: it.s.actor("tiny", train="tp2"), r"make a new one"),
    (lambda it: it.actor.generate(it.b), r"make a new one"),
    (lambda it: it.s.place("split"), r"make a new one"),
    (lambda it: it.s.save("x"), r"make a new one"),
    (lambda it: it.s.snapshot(), r"make a new one"),
    (lambda it: it.p[0], r"make a new one"),
    (lambda it: it.b.map(nothing, reads=["position"], writes=["x"]), r"make a new one"),
    (lambda it: it.b["response"], r"has lengths and bytes, and never had values"),
]

OPEN = [*TRLS_WORDS, *WRONG_VALUES, *LAYOUTS_AND_PLACES, *ORDER_OF_CALLS, *FUNCTIONS, *LOOKING]


def test_there_are_more_than_a_hundred():
    assert len(OPEN) + len(CLOSED) > 140


@pytest.mark.parametrize(("mistake", "cure"), OPEN, ids=[f"{i} {words[:40]}" for i, (_, words) in enumerate(OPEN)])
def test_a_mistake_says_the_cure_and_harms_nothing(it, mistake, cure):
    with pytest.raises((hf.HfsdkError, AttributeError), match=cure) as told:
        mistake(it)
    message = str(told.value)
    assert len(message) < 1500
    assert " object at 0x" not in message
    assert it.actor.generate(it.p[1], max_new_tokens=4).wait().done
    parts_of(it.s).client.drain()  # a right call before the mistake may still be under way
    assert it.s.status == "idle"


def test_a_session_that_met_them_all_trains_on(it):
    for mistake, _ in OPEN:
        with pytest.raises((hf.HfsdkError, AttributeError)):
            mistake(it)
    it.s.critic("tiny")  # one of them released it
    assert it.s.train(SHORT, it.p, steps=2, progress=False).state == "finished"
    assert [handle.name for handle in it.s.roles] == ["actor", "reference", "reward", "critic"]


@pytest.mark.parametrize(("mistake", "words"), CLOSED, ids=range(len(CLOSED)))
def test_a_closed_session_says_so_and_what_can_still_be_read(it, mistake, words):
    it.s.close()
    with pytest.raises((hf.SessionClosedError, hf.SimulatedValueError), match=words):
        mistake(it)
    assert it.s.trace.calls
