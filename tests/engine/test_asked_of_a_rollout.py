"""What a rollout refuses before it generates, and what the store of its processes listens on."""

import socket

import numpy as np
import psutil
import pytest
from expect import refuses

pytest.importorskip("torch")

from hfsdk.core.errors import OptionError
from hfsdk.core.roles import Sampling
from hfsdk.core.spec import ModelSpec
from hfsdk.core.table import Ragged
from hfsdk.engine.generation.rollout import check_request
from hfsdk.engine.process import rendezvous

MODEL = ModelSpec.preset("llama-7b")


def asked(*prompts, longest=8, **sampling):
    rows = Ragged.of(prompts, np.int32)
    check_request(MODEL, longest, rows, np.arange(len(prompts)), Sampling(**sampling), np.arange(len(prompts)) + 100)


def test_prompt_and_response_fit_into_the_context_together():
    asked([1] * 5, [1], longest=8, max_new_tokens=3)
    for row, prompt in enumerate(([1] * 6, [])):
        with refuses(OptionError, 100 + row, len(prompt), "1 to 5"):
            asked(*[[1]] * row, prompt, longest=8, max_new_tokens=3)


def test_tokens_are_the_models():
    asked([0, MODEL.vocab_size - 1], max_new_tokens=1)
    for token in (-1, MODEL.vocab_size):
        with refuses(OptionError, 101, token, MODEL.vocab_size - 1):
            asked([1], [2, token], max_new_tokens=1)


def test_the_store_of_a_pool_listens_on_the_address_it_was_given_alone():
    store, _ = rendezvous.serve("127.0.0.1")
    try:
        ports = [
            c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
        ]
        assert {c.laddr.ip for c in ports} == {"127.0.0.1"}
        socket.create_connection(("127.0.0.1", store.port), timeout=60).close()
    finally:
        store.close()
