"""Runs nanochat's model and optimizer on a request from a file, in a process of its own. Not a test module.

NANOCHAT_DTYPE=float32 TORCH_COMPILE_DISABLE=1 PYTHONPATH=<checkout> python nanochat_peer.py request.pt answer.pt
"""

from __future__ import annotations

import sys
from typing import Any

import torch

# The optimizer's functions are decorated at import: uncompiled they compute the same without a compiler and in seconds.
torch.compile = lambda *_, **__: lambda function: function  # type: ignore[assignment]

from nanochat.checkpoint_manager import load_model, save_checkpoint  # noqa: E402
from nanochat.gpt import GPT, GPTConfig  # noqa: E402
from nanochat.optim import adamw_step_fused, muon_step_fused  # noqa: E402

Request = dict[str, Any]


def fresh_model(config: Request) -> GPT:
    torch.manual_seed(42)  # what nanochat's compute_init does, before building on the meta device
    with torch.device("meta"):
        model = GPT(GPTConfig(**config))
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def init(config: Request) -> Request:
    """Weights of a fresh model, and what nanochat says about it."""
    model = fresh_model(config)
    return {"state": model.state_dict(), "counts": model.num_scaling_params(), "flops": model.estimate_flops()}


def gradients(config: Request, state: Request, idx: torch.Tensor, targets: torch.Tensor) -> Request:
    """Mean loss and gradients of given weights, which must load strictly; the loss again by token."""
    model = fresh_model(config)
    model.load_state_dict(state, strict=True)
    loss = model(idx, targets)
    loss.backward()
    each = model(idx, targets, loss_reduction="none").detach()
    return {"loss": loss.item(), "each": each, "grads": {name: p.grad for name, p in model.named_parameters()}}


def train(config: Request, rates: Request, steps: list[Request], micro_batches: torch.Tensor) -> Request:
    """Losses of a run as base_train drives it; micro_batches (steps, accumulation, B, T + 1)."""
    model = fresh_model(config)
    optimizer = model.setup_optimizer(**rates)
    losses = []
    for settings, rows in zip(steps, micro_batches, strict=True):
        total = 0.0
        for tokens in rows:
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss / len(rows)).backward()
            total += loss.item() / len(rows)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * settings["lr_multiplier"]
            if group["kind"] == "muon":
                group["momentum"], group["weight_decay"] = settings["momentum"], settings["weight_decay"]
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(total)
    return {"losses": losses, "state": model.state_dict()}


def open_checkpoint(tag: str, step: int, idx: torch.Tensor, targets: torch.Tensor) -> Request:
    """Loss by nanochat's own reading of a checkpoint folder, strict, and of the tokenizer under NANOCHAT_BASE_DIR."""
    model, tokenizer, meta = load_model("base", torch.device("cpu"), "eval", model_tag=tag, step=step)
    with torch.no_grad():
        loss = model(idx, targets).item()
    return {"loss": loss, "vocab_size": tokenizer.get_vocab_size(), "step": meta["step"]}


def write_checkpoint(folder: str, config: Request, idx: torch.Tensor, targets: torch.Tensor) -> Request:
    """A few steps of nanochat's optimizer, saved as its base_train does, compiled names included; the loss then."""
    model = fresh_model(config)
    optimizer = model.setup_optimizer()
    for _ in range(3):
        model(idx, targets).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
    with torch.no_grad():
        loss = model(idx, targets).item()
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    meta = {"step": 3, "val_bpb": 3.1, "model_config": config, "user_config": {}, "device_batch_size": 2}
    save_checkpoint(folder, 3, state, optimizer.state_dict(), meta, rank=0)
    return {"loss": loss}


def optimizer_steps(muon: list[Request], adamw: list[Request]) -> Request:
    """Parameters after several steps of each kernel from given start values and gradients."""
    results: Request = {"muon": [], "adamw": []}
    for case in muon:
        params, average, variance = case["params"], case["average"], case["variance"]
        axis = -1 if params.size(-2) >= params.size(-1) else -2
        rate = case["lr"] * max(1.0, params.size(-2) / params.size(-1)) ** 0.5
        scalars = [torch.tensor(value) for value in (case["momentum"], rate, case["weight_decay"], case["beta2"])]
        for grads in case["grads"]:
            muon_step_fused(grads, params, average, variance, *scalars, 5, axis)
        results["muon"].append((params, average, variance))
    for case in adamw:
        param, m, v = case["param"], torch.zeros_like(case["param"]), torch.zeros_like(case["param"])
        values = (case["lr"], *case["betas"], case["eps"], case["weight_decay"])
        for step, grad in enumerate(case["grads"], 1):
            adamw_step_fused(param, grad, m, v, torch.tensor(float(step)), *(torch.tensor(value) for value in values))
        results["adamw"].append((param, m, v))
    return results


if __name__ == "__main__":
    request = torch.load(sys.argv[1], weights_only=True)
    actions = {
        "init": init, "gradients": gradients, "train": train, "optimizer_steps": optimizer_steps,
        "open_checkpoint": open_checkpoint, "write_checkpoint": write_checkpoint,
    }  # fmt: skip
    torch.save(actions[request.pop("do")](**request), sys.argv[2])
