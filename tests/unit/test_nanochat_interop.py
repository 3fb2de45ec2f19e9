"""The model and its optimizer against a real nanochat checkout: point NANOCHAT_CHECKOUT at one."""

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lantrain.data.packing import RowStream
from lantrain.data.shards import open_shards
from lantrain.data.tokenizer import Tokenizer
from lantrain.model.embedding import EmbeddingRows
from lantrain.model.gpt import GPT, GPTConfig, config_for_depth
from lantrain.optim.adamw import adamw_update
from lantrain.optim.groups import parameter_groups
from lantrain.optim.muon import muon_update, second_moment_shape
from lantrain.optim.schedule import Schedule, lr_scale, scaled_weight_decay
from lantrain.training.checkpoint import load_model
from lantrain.training.sample import load_for_sampling
from tests.distributed.ranks import TINY, run_ranks
from tests.unit.model.reference import batch, small_config, trained_looking

Ask = Callable[..., dict[str, Any]]
CHECKOUT = os.environ.get("NANOCHAT_CHECKOUT", "")
pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="NANOCHAT_CHECKOUT is not set: point it at a clone of karpathy/nanochat"
)


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Ask nanochat, eager and in float32, in a process of its own."""

    def call(**request: Any) -> dict[str, Any]:
        torch.save(request, tmp_path / "request.pt")
        env = os.environ | {"PYTHONPATH": CHECKOUT, "NANOCHAT_DTYPE": "float32"}
        env |= {"NANOCHAT_BASE_DIR": str(tmp_path / "base")}
        peer = str(Path(__file__).with_name("nanochat_peer.py"))
        command = [sys.executable, peer, str(tmp_path / "request.pt"), str(tmp_path / "answer.pt")]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return torch.load(tmp_path / "answer.pt", weights_only=True)

    return call


CONFIGS = [small_config(), small_config(n_kv_head=1, n_layer=5, window_pattern="SL"), small_config(vocab_size=320)]


@pytest.mark.parametrize("config", CONFIGS)
def test_same_names_same_bits_of_a_fresh_model_same_counts(ask: Ask, config: GPTConfig) -> None:
    theirs = ask(do="init", config=asdict(config))
    model = GPT(config)
    model.init_weights()
    assert set(theirs["state"]) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs["state"][name]), name
    assert theirs["counts"] == model.parameter_counts()
    assert theirs["flops"] == model.flops_per_token()
    model.load_state_dict(theirs["state"], strict=True)


@pytest.mark.parametrize("config", CONFIGS)
def test_our_weights_give_the_same_loss_and_gradients_there(ask: Ask, config: GPTConfig) -> None:
    model = trained_looking(config)
    idx, targets = batch(config)
    theirs = ask(do="gradients", config=asdict(config), state=model.state_dict(), idx=idx, targets=targets)
    loss = model.loss(idx, targets, scale=1 / int((targets != -1).sum()))
    loss.backward()
    assert loss.item() == pytest.approx(theirs["loss"], abs=1e-5)
    torch.testing.assert_close(
        model.loss(idx, targets, reduction="none").flatten(), theirs["each"], atol=1e-4, rtol=1e-5
    )
    for name, parameter in model.named_parameters():
        expected = theirs["grads"][name]
        assert expected.norm() > 0, name
        assert (parameter.grad - expected).norm() / expected.norm() < 5e-5, name


@pytest.fixture
def base(corpus: Path, tmp_path: Path) -> Path:
    """Shards and tokenizer where both programs look for them."""
    shutil.copytree(corpus, tmp_path / "base", ignore=shutil.ignore_patterns("base_checkpoints"))
    return tmp_path / "base"


def validation_rows(base: Path, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    stream = RowStream(open_shards(base / "base_data_climbmix").val, Tokenizer.load(base / "tokenizer"), seq_len)
    rows = torch.from_numpy(stream.next_rows(8).astype("int64"))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def loss_here(folder: Path, idx: torch.Tensor, targets: torch.Tensor) -> float:
    """By what is in the files of a checkpoint folder alone."""
    _, weights, meta = load_model(folder)
    model = GPT(GPTConfig(**meta["model_config"]))
    model.load_state_dict(weights, strict=True)
    with torch.no_grad():
        return float(model.loss(idx, targets, scale=1 / targets.numel()))


def test_a_checkpoint_of_ours_opens_there(ask: Ask, base: Path) -> None:
    """Trained by two ranks, opened by nanochat's own loader from the files on the disk."""
    run_ranks(2, base, [*TINY, "--num-iterations=12", "--warmup-steps=2"], tag="ours").ok()
    idx, targets = validation_rows(base, 64)
    theirs = ask(do="open_checkpoint", tag="ours", step=12, idx=idx, targets=targets)
    assert (theirs["step"], theirs["vocab_size"]) == (12, 512)
    ours = loss_here(base / "base_checkpoints/ours", idx, targets)
    assert ours < math.log(512) - 0.1  # it has learned, so that the comparison is not of two fresh models
    assert ours == pytest.approx(theirs["loss"], abs=1e-4)


def test_a_checkpoint_of_nanochats_opens_here(ask: Ask, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(vocab_size=512, sequence_len=64)
    idx, targets = validation_rows(base, 64)
    folder = base / "base_checkpoints/theirs"
    theirs = ask(do="write_checkpoint", folder=str(folder), config=asdict(config), idx=idx, targets=targets)
    assert loss_here(folder, idx, targets) == pytest.approx(theirs["loss"], abs=1e-4)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    model, _, which = load_for_sampling("theirs", None)
    assert which == "theirs, step 3 (without our marker), val bpb 3.1"
    assert model.config == config


def test_optimizer_steps(ask: Ask) -> None:
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    muon, adamw = [], []
    for shape in [(64, 64), (32, 128), (128, 32), (2, 12), (1, 12)]:
        grads = [normal(3, *shape) * 10.0**-step for step in range(5)]
        case = {"params": normal(3, *shape), "average": torch.zeros(3, *shape), "grads": grads}
        case |= {"variance": torch.zeros(3, *second_moment_shape(shape)), "beta2": 0.9}
        muon.append(case | {"lr": 0.02, "momentum": 0.87, "weight_decay": 0.3})
    for shape in [(1,), (33, 65)]:
        settings = {"lr": 0.03, "betas": (0.8, 0.995), "eps": 1e-10, "weight_decay": 0.05}
        adamw.append(settings | {"param": normal(*shape), "grads": [normal(*shape) * 10.0**-s for s in range(5)]})
    theirs = ask(do="optimizer_steps", muon=muon, adamw=adamw)

    for case, expected in zip(muon, theirs["muon"], strict=True):
        grads = case.pop("grads")
        ours = case.pop("params"), case.pop("average"), case.pop("variance")
        for grad in grads:
            muon_update(ours[0], grad, *ours[1:], **case)
        for tensor, twin in zip(ours, expected, strict=True):
            # An update within rounding of zero may flip its sign, and with it whether the weight decays (cautious).
            differs = (tensor - twin).abs() > 1e-5 + 1e-4 * twin.abs()
            assert differs.double().mean() < 1e-3
    for case, expected in zip(adamw, theirs["adamw"], strict=True):
        grads, param = case.pop("grads"), case.pop("param")
        m, v = torch.zeros_like(param), torch.zeros_like(param)
        for step, grad in enumerate(grads, 1):
            adamw_update(param, grad, m, v, step=step, **case)
        torch.testing.assert_close([param, m, v], list(expected), atol=1e-6, rtol=1e-5)


def real_rows(steps: int, accumulation: int, rows: int, length: int) -> torch.Tensor:
    """(steps, accumulation, rows, length + 1) words and signs of real text, the source of argparse, numbered."""
    words = re.findall(r"\w+|\W", Path(argparse.__file__).read_text())
    numbers: dict[str, int] = {}
    needed = steps * accumulation * rows * (length + 1)
    assert len(words) >= needed
    flat = torch.tensor([numbers.setdefault(word, len(numbers)) for word in words[:needed]])
    return flat.view(steps, accumulation, rows, length + 1)


def run_here(model: GPT, rates: dict[str, float], steps: list[dict[str, float]], data: torch.Tensor) -> list[float]:
    """The same run as the peer's `train`, with the model and the optimizer steps of this project."""
    groups = parameter_groups(model, **rates)
    weights = dict(model.named_parameters())
    state: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for group in groups:
        for name in group.names:
            second = torch.zeros(second_moment_shape(weights[name].shape)) if group.kind == "muon" else None
            zeros = torch.zeros_like(weights[name].detach())
            state[name] = zeros, torch.zeros_like(zeros) if second is None else second
    losses = []
    for step, (settings, micro_batches) in enumerate(zip(steps, data, strict=True), 1):
        rows = EmbeddingRows.gather(model.embedding_tables(), micro_batches, model.config.vocab_size)
        scale, total = 1 / micro_batches[..., 1:].numel(), 0.0
        for tokens in micro_batches:
            loss = model.loss(tokens[:, :-1], tokens[:, 1:], scale=scale, rows=rows)
            loss.backward()
            total += loss.item()
        losses.append(total)
        for group in groups:
            lr = group.initial_lr * settings["lr_multiplier"]
            for name in group.names:
                weight, (first, second) = weights[name].detach(), state[name]
                if group.kind == "muon":
                    stacks = (z[None] for z in (weight, weights[name].grad, first, second))
                    decay = settings["weight_decay"]
                    muon_update(*stacks, lr=lr, momentum=settings["momentum"], weight_decay=decay)
                    continue
                grad = weights[name].grad
                if name in rows.rows:
                    grad = torch.zeros_like(weight).index_copy_(0, rows.ids, rows.rows[name].grad)
                constants = {"betas": group.betas, "eps": group.eps, "weight_decay": group.weight_decay}
                adamw_update(weight, grad, first, second, step=step, lr=lr, **constants)
        model.zero_grad(set_to_none=True)
    return losses


def twenty_steps(warmup_steps: int) -> tuple[dict[str, Any], Any, list[float]]:
    """A request for nanochat's losses, the rows, and our losses: depth 4, the real rates, scales and schedules for this
    batch; small vocabulary and short rows for speed."""
    config = config_for_depth(4, sequence_len=256, vocab_size=5000)
    data = real_rows(20, 2, 2, 256)
    tokens = 2 * 2 * 256
    scale, ratio = lr_scale(tokens), 12
    decay = scaled_weight_decay(0.28, tokens, ratio * 5e6, ratio * 110e6)
    schedule = Schedule(20, warmup_steps=warmup_steps, weight_decay=decay)
    rates = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "scalar_lr": 0.5}
    rates = {name: rate * scale for name, rate in rates.items()} | {"weight_decay": schedule.weight_decay}
    steps = [
        {
            "lr_multiplier": schedule.lr_multiplier(step),
            "momentum": schedule.muon_momentum(step),
            "weight_decay": schedule.muon_weight_decay(step),
        }
        for step in range(20)
    ]
    model = GPT(config)
    model.init_weights()
    request = {"do": "train", "config": asdict(config), "rates": rates, "steps": steps}
    return request, data, run_here(model, rates, steps, data)


@pytest.mark.slow
def test_twenty_steps_from_the_same_init_and_rows(ask: Ask) -> None:
    request, data, ours = twenty_steps(warmup_steps=80)
    theirs = ask(**request, micro_batches=data)["losses"]
    assert ours[-1] < ours[0] - 0.3  # it learns, so that the comparison is not of two models at rest
    assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.slow
def test_twenty_steps_with_the_default_warmup(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 40 steps of warmup, backout_lambda passes 1 about step 18, where the last norm has next to nothing to
    normalise, and any rounding is amplified a thousandfold (docs/log.md): nanochat leaves itself by 6e-4 when the same
    rows are accumulated in other micro-batches. So the yardstick there is its own departure, the largest of two
    regroupings. By PyTorch's operators: those in C++ are no less exact, but round otherwise; the run above is theirs.
    """
    monkeypatch.setenv("LANTRAIN_KERNELS", "off")
    request, data, ours = twenty_steps(warmup_steps=40)
    theirs = ask(**request, micro_batches=data)["losses"]
    own_departure = 0.0
    for micro_batches, rows in ((4, 1), (1, 4)):
        regrouped = ask(**request, micro_batches=data.view(20, micro_batches, rows, -1))["losses"]
        own_departure = max(own_departure, *(abs(a - b) for a, b in zip(regrouped, theirs, strict=True)))
    assert ours == pytest.approx(theirs, abs=max(1e-3, 5 * own_departure)), own_departure
    assert ours[:16] == pytest.approx(theirs[:16], abs=1e-4)
