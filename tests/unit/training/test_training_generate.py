import itertools

import pytest
import torch

from lantrain.training.generate import generate
from tests.unit.model.reference import small_config, trained_looking

PROMPT = [1, 5, 9]


@pytest.fixture(scope="module")
def model():
    return trained_looking(small_config(n_kv_head=1))


def test_greedy_equals_full_forward_passes(model):
    """Long enough that the window (128) has left the prompt behind."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(150):
            tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    assert list(generate(model, PROMPT, max_tokens=150, temperature=0)) == tokens[len(PROMPT) :]


def test_a_seed_decides_the_sample(model):
    draw = [list(generate(model, PROMPT, max_tokens=20, temperature=1.0, top_k=50, seed=seed)) for seed in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    assert all(0 <= token < 301 for tokens in draw for token in tokens)


def test_top_k_draws_only_from_the_likeliest(model):
    with torch.no_grad():
        likeliest = set(model.logits(torch.tensor([PROMPT]))[0, -1].topk(4).indices.tolist())
    drawn = {next(generate(model, PROMPT, max_tokens=1, temperature=5.0, top_k=4, seed=s)) for s in range(60)}
    assert drawn == likeliest
    assert list(generate(model, PROMPT, max_tokens=9, top_k=1, seed=3)) == list(
        generate(model, PROMPT, max_tokens=9, temperature=0)
    )


def test_high_temperature_flattens(model):
    cold = {next(generate(model, PROMPT, max_tokens=1, temperature=0.05, seed=s)) for s in range(40)}
    hot = {next(generate(model, PROMPT, max_tokens=1, temperature=50.0, seed=s)) for s in range(40)}
    assert len(cold) < len(hot)


def test_tokens_come_one_by_one_and_leave_gradients_on(model):
    stream = generate(model, PROMPT, max_tokens=5, temperature=0)
    first = list(itertools.islice(stream, 2))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert first + list(stream) == list(generate(model, PROMPT, max_tokens=5, temperature=0))
    assert list(generate(model, PROMPT, max_tokens=0)) == []


def test_training_goes_on_after_sampling():
    model = trained_looking(small_config())
    next(generate(model, PROMPT, max_tokens=1))
    idx = torch.zeros(1, 250, dtype=torch.int64)
    model.loss(idx, idx).backward()
    assert model.lm_head.weight.grad.isfinite().all()


def test_bfloat16():
    model = trained_looking(small_config(), torch.bfloat16)
    assert len(list(generate(model, PROMPT, max_tokens=5))) == 5


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"tokens": []}])
def test_mistakes_are_refused_at_once(model, wrong):
    with pytest.raises(ValueError, match=r"at least"):
        generate(model, **({"tokens": PROMPT, "max_tokens": 1} | wrong))
