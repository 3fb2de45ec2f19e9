import pytest
import torch

from lantrain.model.gpt import GPT, config_for_depth
from lantrain.optim.groups import parameter_groups, width_lr_scale


@pytest.fixture
def model():
    with torch.device("meta"):
        return GPT(config_for_depth(4, sequence_len=512, vocab_size=32768))


def test_every_parameter_is_in_exactly_one_group(model):
    names = [name for group in parameter_groups(model) for name in group.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_constants_are_the_recipes(model):
    groups = parameter_groups(
        model, unembedding_lr=0.008, embedding_lr=0.3, matrix_lr=0.02, weight_decay=0.28, scalar_lr=0.5
    )
    scale = (256 / 768) ** -0.5
    rows = [(g.names[0], g.lr, g.betas, g.weight_decay) for g in groups if g.kind == "adamw"]
    assert rows == [
        ("lm_head.weight", pytest.approx(0.008 * scale), (0.8, 0.96), 0.01),
        ("transformer.wte.weight", pytest.approx(0.3 * scale), (0.8, 0.995), 0.001),
        ("value_embeds.1.weight", pytest.approx(0.15 * scale), (0.8, 0.995), 0.01),
        ("resid_lambdas", pytest.approx(0.005), (0.8, 0.95), 0.05),
        ("x0_lambdas", 0.5, (0.96, 0.95), 0.0),
        ("smear_lambda", 0.2, (0.8, 0.95), 0.0),
    ]
    assert all(g.eps == 1e-10 for g in groups)
    muon = [g for g in groups if g.kind == "muon"]
    assert {(g.lr, g.weight_decay, g.beta2) for g in muon} == {(0.02, 0.28, 0.9)}
    assert all(g.initial_lr == g.lr for g in groups)


def test_muon_groups_have_one_shape_each(model):
    groups = [g for g in parameter_groups(model) if g.kind == "muon"]
    shapes = [{tuple(model.get_parameter(name).shape) for name in g.names} for g in groups]
    assert shapes == [{(2, 12)}, {(256, 256)}, {(256, 1024)}, {(1024, 256)}]
    assert [len(g.names) for g in groups] == [2, 16, 4, 4]


def test_the_smear_group_is_not_scaled(model):
    scaled = parameter_groups(model, unembedding_lr=1e-4, embedding_lr=1e-4, matrix_lr=1e-4, scalar_lr=1e-4)
    assert next(g for g in scaled if "smear_lambda" in g.names).lr == 0.2


def test_width_scale_at_depth_8():
    assert f"{width_lr_scale(512):.4f}" == "1.2247"
