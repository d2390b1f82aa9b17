"""A reward that can be verified, on real engines: the data's answers reach the parser, and GRPO learns from 0 and 1."""

import pytest
from system_helpers import lengths_reward

import hfsdk as hf

pytestmark = pytest.mark.filterwarnings("ignore:reward goes on with")
ADDITIONS = hf.data.additions(64, seed=2)


@pytest.fixture(autouse=True, scope="module")
def exact(live):
    live.session.reward(hf.data.exact_match)
    yield
    live.session.reward(lengths_reward)


def test_a_tracker_keeps_what_real_engines_said(live, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    prompts = live.session.prompts(ADDITIONS, column="prompt", batch_size=4, seed=1)
    algorithm = hf.GRPO(n=2, max_new_tokens=5, kl_coef=0.0)
    run = live.session.train(algorithm, prompts, steps=2, track=hf.TensorBoard(str(tmp_path), name="run"))
    read = EventAccumulator(str(tmp_path / "run"))
    read.Reload()
    for name in ("actor_grad_norm", "score_mean"):
        kept = [float(make_ndarray(event.tensor_proto)) for event in read.Tensors(f"train/{name}")]
        assert kept == pytest.approx([row[name] for row in run.rows])
    _, *rows = make_ndarray(read.Tensors("samples")[1].tensor_proto)
    batch = run.last.batch
    for i, (prompt, response, given) in enumerate(rows):
        assert (prompt.decode(), response.decode()) == (batch.text("prompt")[i], batch.text("response")[i])
        assert float(given) == batch["scores"][i]


def test_data_without_answers_names_the_column(live):
    prompts = live.session.prompts(["1+1="] * 4, batch_size=4)
    words = r"reward: exact_match\(.*\) needs 'answer', which the data does not have; .* columns .*finish_reason"
    with pytest.raises(hf.ColumnError, match=words):
        live.session.train(hf.GRPO(n=2, max_new_tokens=3, kl_coef=0.0), prompts, steps=1)


def test_prompts_in_every_form_generate_evaluate_and_train(live):
    """Texts, a Series, a DataFrame, a Dataset and conversations give the same responses; the data's answers reach the reward."""
    import pandas as pd
    from datasets import Dataset

    session, few = live.session, {"max_new_tokens": 4, "temperature": 0.0}
    texts, answers = ADDITIONS["prompt"][:6], ADDITIONS["answer"][:6]
    kinds = [
        texts, pd.Series(texts), pd.DataFrame({"prompt": texts, "answer": answers}), Dataset.from_dict({"text": texts}),
        [{"prompt": text, "completion": "5"} for text in texts],
        [session.prompts(texts, shuffle=False).token_ids(i) for i in range(6)],
    ]  # fmt: skip
    found = [live.actor.generate(kind, **few).text() for kind in kinds]
    assert all(responses == found[0] for responses in found)
    chats = [[{"role": "user", "content": text}] for text in texts]
    as_chat = session.prompts(texts, chat=True, shuffle=False, batch_size=6)[0]
    for kind in (chats, {"prompt": chats}, Dataset.from_dict({"messages": chats})):
        batch = live.actor.generate(kind, **few)
        assert batch["prompt"] == as_chat["prompt"]
        assert batch.text() == live.actor.generate(as_chat, **few).text()
    frame = kinds[2]
    assert session.evaluate(frame, max_new_tokens=4, temperature=0.0)["num_prompts"].tolist() == [6]
    rows = [session.train(hf.GRPO(n=2, max_new_tokens=2, kl_coef=0.0), frame, steps=1, progress=False) for _ in range(2)]
    assert [len(run.last.batch) for run in rows] == [64, 64]
    assert rows[0].last.batch["position"].max() < rows[1].last.batch["position"].min(), "the same data goes on where it was"
    experiment = session.compare([hf.GRPO(n=2, max_new_tokens=2, kl_coef=0.0)], frame, steps=1, seeds=[0], progress=False)
    assert len(experiment.to_pandas()) == 1


def test_what_a_reward_prints_is_in_its_logs(live):
    def says(completions):
        print(f"scoring {len(completions)} completions")
        return [0.0] * len(completions)

    live.session.reward(says)
    live.session.reward(says).compute_scores(live.actor.generate(["1+1="] * 3, max_new_tokens=2)).wait()
    assert live.session.logs("reward").splitlines()[-1] == "scoring 3 completions"
    live.session.reward(hf.data.exact_match)
