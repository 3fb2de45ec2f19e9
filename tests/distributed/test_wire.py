"""The wire: rounding costs no accuracy that the owner does not keep, and early sending changes no bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lantrain.cluster.group import Ranks
from lantrain.optim import wire
from lantrain.optim.groups import parameter_groups
from lantrain.optim.owners import Piece
from lantrain.optim.sharded import LATE, ShardedOptimizer
from lantrain.optim.wire import BUCKET_ELEMENTS, Parcel, make_buckets
from tests.distributed.ranks import TINY, run_ranks, together
from tests.distributed.test_sharded import SCHEDULE, _add_gradients, _mine, _model, _optimizer, _train

ROOT = Path(__file__).resolve().parents[2]


def _piece(name: str, numel: int, rounded: bool) -> Piece:
    return Piece(name, 0, 0, 1, numel, 1.0, rounded)


def test_a_parcel_gives_back_what_was_packed() -> None:
    pieces = (_piece("a", 5, True), _piece("b", 3, False), _piece("c", 4, True), _piece("d", 1, False))
    values = {piece: torch.randn(piece.numel) for piece in pieces}
    parcel = Parcel(pieces, torch.bfloat16)
    assert parcel.bytes == 40  # 4 * (3 + 1) + 2 * (5 + 4) = 34, padded to 8
    buffer = parcel.pack(values.__getitem__)
    assert buffer.numel() == parcel.bytes
    unpacked = dict(parcel.unpack(buffer))
    assert set(unpacked) == set(pieces)
    for piece, got in unpacked.items():
        expected = values[piece].bfloat16() if piece.worth_rounding else values[piece]
        assert torch.equal(got, expected)


def test_a_parameter_is_in_one_bucket_and_scalars_come_last() -> None:
    large = BUCKET_ELEMENTS // 2
    head = [Piece("head", 0, i, i + 1, large, 1.0, True) for i in range(5)]
    rest = [_piece("late", 2 * large, True), _piece("scalar", 1, False), _piece("early", large, True)]
    owned = [[*head[:3], rest[1]], [*head[3:], rest[0], rest[2]]]
    buckets = make_buckets(owned, ["head", "early", "late", "scalar"])
    names = [{piece.name for owner in bucket for piece in owner} for bucket in buckets]
    assert names == [{"head"}, {"early", "late"}, {"scalar"}]
    assert [[len(owner) for owner in bucket] for bucket in buckets] == [[3, 2], [0, 2], [1, 0]]


def _steps(ranks: Ranks, dtype: torch.dtype) -> Any:
    model = _model()
    optimizer = _optimizer(model, ranks, None, dtype)
    _train(model, optimizer, ranks, range(3))
    return {name: t.detach() for name, t in model.named_parameters()}, optimizer.full_weights()


def test_rounding_for_the_wire_keeps_the_owners_weights_whole() -> None:
    """The test's gradients are exact in bfloat16: owners keep the fp32 run's weights, ranks hold those, rounded."""
    exact, _ = together(2, partial(_steps, dtype=torch.float32))[0]
    results = together(2, partial(_steps, dtype=torch.bfloat16))
    masters = results[0][1]
    assert results[1][1] == {}
    for name, tensor in results[0][0].items():
        assert torch.equal(tensor, results[1][0][name]), f"the ranks differ in {name}"
        if name in masters:
            assert torch.equal(masters[name], exact[name])
            assert torch.equal(tensor, exact[name].bfloat16().float())
        else:
            assert torch.equal(tensor, exact[name]), f"{name} was not to be rounded"
    assert {"lm_head.weight", "transformer.h.0.mlp.c_fc.weight"} <= set(masters)
    assert not {"resid_lambdas", "backout_lambda", "transformer.wte.weight"} & set(masters)


def _backward_passes(ranks: Ranks, early: bool) -> Any:
    """Two steps of two real backward passes each, a rank without rows among them; buckets sent within the last."""
    model = _model()
    optimizer = _optimizer(model, ranks, [1.0, 1.0, 0.0])
    within = 0
    for step in range(2):
        rows = None
        if ranks.rank < 2:
            data = torch.randint(0, 200, (2, 17), generator=torch.Generator().manual_seed(10 * step + ranks.rank))
            rows = optimizer.gather_rows(data[:, :-1])
            for micro in range(2):
                if early and micro == 1:
                    optimizer.gradients_become_final()
                one = data[micro : micro + 1]
                model.loss(one[:, :-1], one[:, 1:], scale=1 / 64, rows=rows).backward()
                within += len(optimizer._pending)
        optimizer.send_gradients()
        optimizer.step(rows, **SCHEDULE)
    optimizer.finish()
    return {name: t.detach() for name, t in model.named_parameters()}, within


def test_sending_within_the_backward_pass_changes_no_bit() -> None:
    late = together(3, partial(_backward_passes, early=False))
    early = together(3, partial(_backward_passes, early=True))
    assert [within for _, within in late] == [0, 0, 0]
    assert min(within for _, within in early[:2]) >= 2  # at least a bucket a step was on its way
    for names, _ in early:
        for name, tensor in names.items():
            assert torch.equal(tensor, late[0][0][name]), name


def _late_steps(ranks: Ranks, late: set[str], dtype: torch.dtype) -> Any:
    """Three steps whose passes read the weights through the optimizer's casts; how many exchanges were under way."""
    wire.BUCKET_ELEMENTS = 2**12  # here alone, in a process of the test: the head has a bucket of its own
    model = _model()
    tables = set(model.embedding_tables())
    params = dict(model.named_parameters())
    optimizer = ShardedOptimizer(params, parameter_groups(model), tables, ranks, wire_dtype=dtype, late=late)
    on_their_way = []
    for step in range(3):
        data = torch.randint(0, 200, (1, 17), generator=torch.Generator().manual_seed(10 * step + ranks.rank))
        rows = optimizer.gather_rows(data[:, :-1])
        on_their_way.append(len(optimizer._on_their_way))
        model.loss(data[:, :-1], data[:, 1:], scale=1 / 48, rows=rows).backward()
        optimizer.step(rows, **SCHEDULE)
    optimizer.finish()
    return {name: t.detach() for name, t in model.named_parameters()}, on_their_way, optimizer.waited


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_arrive_during_the_next_forward_pass_change_no_bit(dtype: torch.dtype) -> None:
    plain = together(3, partial(_late_steps, late=set(), dtype=dtype))
    early = together(3, partial(_late_steps, late=LATE, dtype=dtype))
    assert [on_their_way for _, on_their_way, _ in plain] == [[0, 0, 0]] * 3
    assert [on_their_way for _, on_their_way, _ in early] == [[0, 1, 1]] * 3, "the head's bucket, from the second step"
    for names, _, waited in early:
        assert waited > 0
        for name, tensor in names.items():
            assert torch.equal(tensor, plain[0][0][name]), name


def _skip(ranks: Ranks) -> Any:
    model = _model()
    optimizer = _optimizer(model, ranks, None)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if name not in model.embedding_tables():
            param.grad = torch.ones_like(param)
    optimizer.skip_step()
    unchanged = all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    _train(model, optimizer, ranks, range(3))
    return unchanged, {name: t.detach() for name, t in model.named_parameters()}


def test_a_skipped_step_leaves_nothing_behind() -> None:
    straight, _ = together(2, partial(_steps, dtype=torch.float32))[0]
    for unchanged, names in together(2, _skip):
        assert unchanged
        for name, tensor in names.items():
            assert torch.equal(tensor, straight[name]), name


def test_rounded_run_follows_the_exact_one_and_resumes_from_its_masters(base: Path) -> None:
    flags = [*TINY, "--num-iterations=40", "--warmup-steps=5", "--save-every=20", "--shares=1,1"]
    exact = run_ranks(2, base, [*flags, "--wire-dtype=float32"], tag="exact").ok()
    rounded = run_ranks(2, base, [*flags, "--wire-dtype=bfloat16"], tag="rounded").ok()
    assert "travel in bfloat16 (--wire-dtype bfloat16" in rounded.log
    for one, other in zip(exact.losses, rounded.losses, strict=True):
        assert other == pytest.approx(one, rel=5e-3)
    shutil.copytree(base / "base_checkpoints/rounded", base / "base_checkpoints/again")
    for path in (base / "base_checkpoints/again").glob("*40*"):
        path.unlink()
    again = run_ranks(2, base, [*flags, "--wire-dtype=bfloat16", "--resume=auto"], tag="again").ok()
    assert "newest complete checkpoint is of step 20" in again.log
    assert again.losses == rounded.losses  # bit for bit: the checkpoint has what the owners kept


COUNT = """
import json, sys
from functools import partial
from tests.distributed.test_wire import count_bytes
if __name__ == "__main__":
    print(json.dumps(count_bytes(int(sys.argv[1]))))
"""


def _sent_on_loopback() -> int:
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _count(ranks: Ranks) -> Any:
    model = _model()
    optimizer = _optimizer(model, ranks, None, torch.bfloat16)
    _train(model, optimizer, ranks, range(1))  # connections are made
    torch.distributed.barrier()
    before = _sent_on_loopback()
    torch.distributed.barrier()
    _train(model, optimizer, ranks, range(1, 21))
    torch.distributed.barrier()
    sent = _sent_on_loopback() - before
    mine = _mine(ranks)
    touched = sum(_add_gradients(model, optimizer, step, mine).ids.numel() for step in range(1, 21))
    return sent, 20 * sum(optimizer.bytes_per_step().values()), optimizer.tables.bytes_per_row() * touched


def count_bytes(world: int) -> tuple[int, int, int]:
    """Bytes that crossed the loopback interface, that the optimizers say they sent, and that the rows take."""
    results = together(world, _count)
    others = world - 1
    return results[0][0], sum(dense for _, dense, _ in results), sum(rows * others for _, _, rows in results)


@pytest.mark.parametrize("world", [2, 4])
def test_the_interface_counts_the_bytes_that_the_plan_names(world: int) -> None:
    """In a network namespace of its own, so that nothing else is counted."""
    inside = f"ip link set lo up && exec {sys.executable} -c '{COUNT}' {world}"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", inside], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": f"{ROOT}/app:{ROOT}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if "Operation not permitted" in done.stderr:
        pytest.skip("making a network namespace needs root")
    assert done.returncode == 0, done.stderr
    counted, dense, rows = json.loads(done.stdout.splitlines()[-1])
    # Headers of TCP and Ethernet, those of Gloo's messages, and the small exchanges come on top.
    assert dense + rows < counted < 1.1 * (dense + rows)
