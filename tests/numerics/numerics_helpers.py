"""What the tests of tests/numerics share: `Plain` and `Judge`, transformers as the reference; columns flat and by row."""

import json

import numpy as np
import torch

EOS = 258
FP32 = 1e-4
"""Two implementations of one model in fp32 differ by less in a log-probability."""


class Plain:
    """``tiny`` in transformers, fp32."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()

    @torch.no_grad()
    def logits(self, prompt, response):
        """Logits before each response token; [response, vocabulary]."""
        tokens = torch.tensor([[*prompt, *response]])
        return self.model(tokens).logits[0, len(prompt) - 1 : -1]

    def log_probs(self, prompt, response, temperature=1.0):
        each = (self.logits(prompt, response) / temperature).log_softmax(-1)
        return each.gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()


class Judge:
    """The body of ``tiny`` with a random scalar head, in transformers; saved as a folder for a reward model and a critic."""

    def __init__(self, tiny, folder):
        from transformers import AutoModelForSequenceClassification

        torch.manual_seed(5)
        self.model = AutoModelForSequenceClassification.from_pretrained(tiny, dtype=torch.float32, num_labels=1)
        torch.nn.init.normal_(self.model.score.weight, std=0.3)
        self.model.eval()
        self.model.model.embed_tokens.padding_idx = None  # the token of that id is a token like any other (point 1)
        self.model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))  # a trainer must not take it

    @torch.no_grad()
    def states(self, prompt, response):
        """The head at every token of prompt and response."""
        hidden = self.model.model(torch.tensor([[*prompt, *response]])).last_hidden_state
        return self.model.score(hidden)[0, :, 0].numpy()

    def values(self, prompt, response):
        """The head before every response token."""
        return self.states(prompt, response)[len(prompt) - 1 : -1]

    def score(self, prompt, response):
        """The head at the last token; [1]."""
        return self.states(prompt, response)[-1:]


def flat(batch, name):
    return np.asarray(batch[name].flat)


def each_row(rows, function):
    return np.concatenate([function(p, r) for p, r in zip(rows["prompt"], rows["response"], strict=True)])


def forget_gradient(rank):
    rank._hosted.trainer.zero_grad()
