import pytest
import torch
import torch.nn.functional as F

from lantrain.model.embedding import EmbeddingRows
from lantrain.model.gpt import GPT, GPTConfig, config_for_depth
from tests.unit.model.reference import batch, double_weights, reference_loss, small_config, trained_looking


def on_meta(depth, sequence_len):
    with torch.device("meta"):
        return GPT(config_for_depth(depth, sequence_len=sequence_len, vocab_size=32768))


def relative_error(value, expected):
    return float((value.double() - expected).norm() / expected.norm())


def test_reference_counts():
    four, eight = on_meta(4, 512), on_meta(8, 1024)
    assert four.parameter_counts()["total"] == 36_700_242
    assert eight.parameter_counts() == {
        "wte": 16_777_216,
        "value_embeds": 67_108_864,
        "lm_head": 16_777_216,
        "transformer_matrices": 25_166_016,
        "scalars": 42,
        "total": 125_829_354,
    }
    assert f"{four.flops_per_token():.1e}" == "7.2e+07"


def test_state_dict_names_are_nanochats():
    expected = {"transformer.wte.weight", "lm_head.weight", "smear_gate.weight"}
    expected |= {"resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda"}
    for i in range(4):
        expected |= {f"transformer.h.{i}.attn.{name}.weight" for name in ("c_q", "c_k", "c_v", "c_proj")}
        expected |= {f"transformer.h.{i}.mlp.{name}.weight" for name in ("c_fc", "c_proj")}
    for i in (1, 3):
        expected |= {f"transformer.h.{i}.attn.ve_gate.weight", f"value_embeds.{i}.weight"}
    model = GPT(small_config())
    model.init_weights()
    model.loss(*batch(model.config))  # the rotary tables exist now and must not be saved
    assert set(model.state_dict()) == expected
    assert set(model.embedding_tables()) == {"transformer.wte.weight", "value_embeds.1.weight", "value_embeds.3.weight"}


@pytest.mark.parametrize(("sequence_len", "short"), [(512, 128), (1024, 256), (2048, 512), (128, 128), (513, 256)])
def test_windows(sequence_len, short):
    config = config_for_depth(6, sequence_len=sequence_len, vocab_size=64, window_pattern="SSL")
    assert config.windows() == [short, short, sequence_len, short, short, sequence_len]
    ends_short = config_for_depth(4, sequence_len=sequence_len, vocab_size=64, window_pattern="s")
    assert ends_short.windows() == [short, short, short, sequence_len]


def test_width_is_rounded_up_to_whole_heads():
    config = config_for_depth(5, sequence_len=64, vocab_size=64)
    assert (config.n_embd, config.n_head, config.n_kv_head) == (384, 3, 3)


@pytest.mark.parametrize("wrong", [{"n_head": 3}, {"n_kv_head": 3}, {"window_pattern": "SXL"}, {"window_pattern": ""}])
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be a multiple|only the letters"):
        small_config(**wrong)


@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 1}, {"n_layer": 3, "window_pattern": "LS"}, {"n_layer": 5}])
def test_loss_and_every_gradient_equal_the_reference_in_double(changes):
    model = trained_looking(small_config(**changes))
    idx, targets = batch(model.config)
    weights = double_weights(model)
    expected = reference_loss(weights, model.config, idx, targets)
    expected.backward()
    loss = model.loss(idx, targets)
    loss.backward()
    assert relative_error(loss.detach(), expected.detach()) < 1e-6
    for name, parameter in model.named_parameters():
        assert weights[name].grad.norm() > 0, name
        assert relative_error(parameter.grad, weights[name].grad) < 2e-5, name


def test_bfloat16_stays_near_the_reference():
    model = trained_looking(small_config(), torch.bfloat16)
    idx, targets = batch(model.config)
    weights = double_weights(model)
    expected = reference_loss(weights, model.config, idx, targets)
    expected.backward()
    loss = model.loss(idx, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert relative_error(loss.detach(), expected.detach()) < 2e-3
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert relative_error(parameter.grad, weights[name].grad) < 0.06, name


def test_gathered_rows_give_the_gradients_of_dense_tables_and_leave_the_tables_alone():
    dense, sparse = trained_looking(small_config()), trained_looking(small_config())
    idx, targets = batch(dense.config)
    dense.loss(idx, targets).backward()
    rows = EmbeddingRows.gather(sparse.embedding_tables(), idx, sparse.config.vocab_size)
    loss = sparse.loss(idx, targets, rows=rows)
    loss.backward()
    assert torch.equal(loss, dense.loss(idx, targets))
    for name, table in dense.embedding_tables().items():
        scattered = torch.zeros_like(table)
        scattered[rows.ids] = rows.rows[name].grad
        assert torch.equal(scattered, table.grad), name
        assert sparse.embedding_tables()[name].grad is None
    for name, parameter in sparse.named_parameters():
        if name not in rows.rows:
            assert torch.equal(parameter.grad, dict(dense.named_parameters())[name].grad), name


def test_micro_batches_add_up():
    whole, parts = trained_looking(small_config()), trained_looking(small_config())
    idx, targets = batch(whole.config, rows=3)
    whole.loss(idx, targets, scale=0.01).backward()
    rows = EmbeddingRows.gather(parts.embedding_tables(), idx, parts.config.vocab_size)
    for part in range(3):
        parts.loss(idx[part : part + 1], targets[part : part + 1], scale=0.01, rows=rows).backward()
    for name, parameter in whole.named_parameters():
        grad = dict(parts.named_parameters())[name].grad
        if name in rows.rows:
            grad = torch.zeros_like(parameter).index_copy(0, rows.ids, rows.rows[name].grad)
        assert relative_error(grad, parameter.grad.double()) < 1e-5, name


def test_losses_by_token_sum_to_the_loss():
    model = trained_looking(small_config())
    idx, targets = batch(model.config)
    each = model.loss(idx, targets, reduction="none")
    assert each.shape == idx.shape
    assert not each.requires_grad
    assert (each[targets == -1] == 0).all()
    total = model.loss(idx, targets, scale=0.5)
    torch.testing.assert_close(each.sum() * 0.5, total.detach())
    with torch.no_grad():
        torch.testing.assert_close(model.loss(idx, targets, scale=0.5), total.detach())


def test_logits_agree_with_the_loss():
    model = trained_looking(small_config())
    idx, targets = batch(model.config)
    logits = model.logits(idx)
    assert logits.shape == (*idx.shape, model.config.vocab_size)
    flat = logits.flatten(0, 1)
    expected = F.cross_entropy(flat, targets.flatten(), ignore_index=-1, reduction="sum")
    torch.testing.assert_close(model.loss(idx, targets), expected)


def test_padding_of_the_vocabulary_takes_no_part():
    model = trained_looking(small_config())
    idx, targets = batch(model.config)
    before = model.loss(idx, targets).detach()
    with torch.no_grad():
        model.lm_head.weight[model.config.vocab_size :] = 100.0
    after = model.loss(idx, targets)
    after.backward()
    assert torch.equal(before, after.detach())
    assert model.lm_head.weight.shape[0] == 320
    assert (model.lm_head.weight.grad[model.config.vocab_size :] == 0).all()


def test_rotary_tables_grow_beyond_the_training_length():
    model = trained_looking(small_config(sequence_len=64))
    idx, targets = batch(model.config, length=64)
    short = model.logits(idx)
    longer, _ = batch(model.config, length=700)
    longer[:, :64] = idx
    torch.testing.assert_close(model.logits(longer)[:, :64], short)
    assert model.loss(idx, targets).isfinite()


def test_init_is_reproducible_and_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two, other = (GPT(small_config()) for _ in range(3))
    one.init_weights()
    two.init_weights(42)
    other.init_weights(43)
    assert torch.equal(before, torch.get_rng_state())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(name)), name
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_init_has_the_recipes_scales():
    model = GPT(small_config(n_embd=128, vocab_size=4096))
    model.init_weights()
    weight = {name: parameter.detach() for name, parameter in model.named_parameters()}
    std = 128**-0.5
    for name, expected in {
        "transformer.wte.weight": 0.8,
        "lm_head.weight": 0.001,
        "transformer.h.0.attn.c_q.weight": std,
        "transformer.h.2.attn.c_v.weight": std,
        "transformer.h.0.mlp.c_fc.weight": 0.4 * std,
        "value_embeds.1.weight": std,
    }.items():
        assert weight[name].std().item() == pytest.approx(expected, rel=0.03), name
    assert weight["transformer.h.1.attn.c_proj.weight"].abs().max() == 0
    assert weight["transformer.h.1.mlp.c_proj.weight"].abs().max() == 0
    for name in ("smear_gate.weight", "transformer.h.1.attn.ve_gate.weight"):
        assert 0 <= weight[name].min() < weight[name].max() <= 0.02
    torch.testing.assert_close(weight["resid_lambdas"], torch.linspace(1.15, 1.05, 4))
    torch.testing.assert_close(weight["x0_lambdas"], torch.linspace(0.20, 0.05, 4))
    assert weight["smear_lambda"].item() == 0
    assert weight["backout_lambda"].item() == pytest.approx(0.2)


def test_first_loss_is_that_of_a_uniform_guess():
    config = GPTConfig(sequence_len=32, vocab_size=1000, n_layer=2, n_head=1, n_kv_head=1, n_embd=64)
    model = GPT(config)
    model.init_weights()
    idx, _ = batch(config)
    loss = model.loss(idx, idx.roll(1), scale=1 / idx.numel())
    assert loss.item() == pytest.approx(torch.tensor(1000.0).log().item(), abs=0.01)
