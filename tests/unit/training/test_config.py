"""The command line is nanochat's; mistakes are one line that helps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lantrain.errors import UserError
from lantrain.flags import LARGEST
from lantrain.training.config import build_parser, evaluation_rows, parse, parse_shares
from lantrain.training.plan import make_plan, plan_lines
from tests.distributed.ranks import APP

NANOCHAT_DEFAULTS = {
    "run": "dummy", "device_type": "", "fp8": False, "fp8_recipe": "tensorwise", "depth": 20, "aspect_ratio": 64,
    "head_dim": 128, "max_seq_len": 2048, "window_pattern": "SSSL", "num_iterations": -1, "target_flops": -1.0,
    "target_param_data_ratio": 12, "device_batch_size": 32, "total_batch_size": -1, "embedding_lr": 0.3,
    "unembedding_lr": 0.008, "weight_decay": 0.28, "matrix_lr": 0.02, "scalar_lr": 0.5, "warmup_steps": 40,
    "warmdown_ratio": 0.65, "final_lr_frac": 0.05, "resume_from_step": -1, "eval_every": 250,
    "eval_tokens": 41943040, "core_metric_every": 2000, "core_metric_max_per_task": 500, "sample_every": 2000,
    "save_every": -1, "model_tag": None,
}  # fmt: skip
FORK = {"tracker": "none", "mlflow_uri": None, "mlflow_experiment": None}
OWN = {
    "resume", "save_minutes", "skip_outliers", "keep_last", "shares", "rates", "rebalance", "stop_after", "dry_run",
    "wire_dtype", "world_size", "sync", "local_steps", "outer_lr", "outer_momentum", "delta_bits", "moments_dtype",
}  # fmt: skip

REPORT = (
    "--device-type cpu --depth 4 --max-seq-len 512 --device-batch-size 2 --total-batch-size 2048 "
    "--num-iterations 20 --eval-every 10 --tracker none --run dist-cpu-2node"
).split()


def test_flags_and_defaults_are_frozen() -> None:
    defaults = vars(build_parser().parse_args([]))
    assert {name: value for name, value in defaults.items() if name not in OWN} == NANOCHAT_DEFAULTS | FORK
    assert set(defaults) >= OWN


def test_command_of_the_report_parses_with_and_without_the_separator() -> None:
    config = parse(REPORT)
    assert vars(config.args) == vars(parse(["--", *REPORT]).args)
    assert config.args.total_batch_size == 2048
    assert config.tag == "d4"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--total-batch-size 2000 --max-seq-len 512",
            "total-batch-size 2000 is not a multiple of max-seq-len 512; nearest: 1536, 2048",
        ),
        ("--total-batch-size 100 --max-seq-len 512", "nearest: 512"),
        ("--total-batch-size 0", "nearest: 2048"),
        ("--fp8", "runs on CPUs"),
        ("--device-type cuda", "use --device-type cpu"),
        ("--device-type mps", "use --device-type cpu"),
        ("--tracker wandb", "--tracker wandb is not there yet"),
        ("--core-metric-every 100", "CORE metric is not there yet"),
        ("--depth 0", "--depth must be from 1 to 1,000, not 0"),
        ("--depht 4", "unrecognized arguments: --depht 4 (did you mean --depth? "),
        ("--device_type cpu", "did you mean --device-type?"),
        ("--quite-another 4", "unrecognized arguments: --quite-another 4 (python -m scripts.base_train --help"),
        ("--depth four", "invalid int value"),
        ("--head-dim 63", "odd"),
        ("--window-pattern SXL", "letters S and L"),
        ("--num-iterations 0", "at least 1"),
        ("--target-param-data-ratio -1", "how long to train"),
        ("--model-tag ../d4", "not a folder name"),
        ("--world-size 2", "--dry-run"),
        ("--eval-tokens 100 --max-seq-len 512", "less than one row"),
        ("--keep-last -1", "0 to keep all"),
        ("--local-steps 0", "at least 1"),
        ("--outer-lr 0", "--outer-lr 0"),
        ("--outer-momentum 1", "below 1"),
        ("--delta-bits 3", "invalid choice"),
        ("--max-seq-len 1", "at least 2"),
        ("--warmup-steps -1", "--warmup-steps must be from 0 to 2,147,483,647"),
        ("--weight-decay -0.1", "--weight-decay must be at least 0"),
        ("--warmdown-ratio 1.5", "--warmdown-ratio 1.5 is not a share of the run"),
        ("--matrix-lr=-1", "--matrix-lr must be at least 0"),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_anything_slow(flags: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(flags.split())
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


FLOATS = [name for name, value in vars(build_parser().parse_args([])).items() if isinstance(value, float)]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_numbers_must_be_finite(name: str, value: str) -> None:
    """Not a number passes every comparison with a limit, and would come to light as a traceback or a lost loss."""
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"{flag} (nan|-?inf) is not a number to compute with"):
        parse(["--depth=4", f"{flag}={value}"])


WHOLE = [action.option_strings[0] for action in build_parser()._actions if action.type is int]


@pytest.mark.parametrize("flag", WHOLE)
@pytest.mark.parametrize("value", [LARGEST + 1, 10**20, 10**400], ids=["2**31", "1e20", "1e400"])
def test_whole_numbers_have_a_limit(flag: str, value: int) -> None:
    """Python's own have none: tensors and lists of such a size are a traceback, or a plan that is never done."""
    others = [] if flag == "--depth" else ["--depth=4"]
    bounds = r"must be (at most|from \d to) [\d,]+"
    with pytest.raises(UserError, match=rf"^(argument )?{flag}( {bounds}, not {value}|: invalid choice)"):
        parse(["--dry-run", *others, f"{flag}={value}"])


@pytest.mark.parametrize("flags", ["--target-param-data-ratio=1e300", "--target-flops=1e300", "--target-flops=1e30"])
def test_horizons_have_a_limit(flags: str) -> None:
    with pytest.raises(UserError, match=r"(must be at most 1,000,000|gives \d\.\de\+\d+ steps)"):
        make_plan(parse(["--depth=2", "--max-seq-len=64", "--total-batch-size=4096", flags]), 512)


def test_a_plan_at_the_limits() -> None:
    """What is let through is planned: no tensor's size overflows."""
    flags = "--depth=1000 --aspect-ratio=4096 --head-dim=4096 --max-seq-len=33554432 --num-iterations=2147483647"
    plan = make_plan(parse([*flags.split(), "--total-batch-size=67108864"]), 32768)
    assert plan.rows == 2
    assert plan.counts["total"] > 10**16


def test_a_model_too_narrow_for_its_gates() -> None:
    flags = "--depth 1 --aspect-ratio 2 --head-dim 2 --num-iterations 5 --total-batch-size 2048"
    with pytest.raises(UserError, match="gives 2 channels, and the gates read 24"):
        make_plan(parse(flags.split()), 512)


def test_dtype_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", "float16")
    with pytest.raises(UserError, match="NANOCHAT_DTYPE=float16"):
        parse([])


def test_core_by_default_is_left_out_with_a_line() -> None:
    config = parse(REPORT)
    assert any("CORE" in line and "goes on" in line for line in plan_lines(make_plan(config, 512), config, 1))


def test_evaluation_size_is_what_was_asked_or_a_few_steps() -> None:
    assert evaluation_rows(parse(REPORT), 4, 512) == 32
    assert evaluation_rows(parse([*REPORT, "--eval-tokens", "5120"]), 4, 512) == 10


def test_shares_need_one_number_a_rank() -> None:
    assert parse_shares(None, 3) == [1, 1, 1]
    assert parse_shares("3,1", 2) == [3, 1]
    for text in ("3", "a,b", "0,0", "-1,2", "", "nan,1", "1,nan", "inf,1", "1e308,1e308"):
        with pytest.raises(UserError):
            parse_shares(text, 2)


def test_plan_prints_the_reference_numbers() -> None:
    config = parse("--depth 8 --max-seq-len 1024 --total-batch-size 4096 --device-batch-size 2".split())
    text = "\n".join(plan_lines(make_plan(config, 32768), config, 3))
    for expected in (
        "125,829,354", "67,108,864", "25,166,016", "Scaling LRs by 0.0884", "to 0.064965 for depth 8", "= 1.224745",
        "rank 0: 2 rows in 1 micro-batches [2]", "rank 2: 1 rows in 1 micro-batches [1]", "12.00 per scaling parameter",
    ):  # fmt: skip
        assert expected in text


def test_horizon_comes_from_the_first_flag_that_is_given() -> None:
    base = "--depth 4 --max-seq-len 512 --total-batch-size 2048".split()
    assert make_plan(parse([*base, "--num-iterations", "7", "--target-flops", "1e15"]), 32768).num_iterations == 7
    flops = make_plan(parse([*base, "--target-flops", "1e15"]), 32768)
    assert flops.num_iterations == round(1e15 / (flops.flops_per_token * 2048))
    ratio = make_plan(parse([*base, "--target-param-data-ratio", "2"]), 32768)
    assert ratio.num_iterations == 2 * (3_145_776 + 8_388_608) // 2048


def test_auto_batch_is_a_power_of_two_that_rows_fill() -> None:
    plan = make_plan(parse("--depth 4 --max-seq-len 512".split()), 32768)
    assert plan.total_batch & (plan.total_batch - 1) == 0
    assert plan.rows * 512 == plan.total_batch


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--dry-run", *REPORT, "--world-size", "5"], 0, "rank 4: 0 rows in 0 micro-batches"),
        (["--total-batch-size", "2000", "--max-seq-len", "512"], 2, "error: total-batch-size 2000"),
        (["--fp8"], 2, "error: --fp8"),
        (["--dry-run", *REPORT, "--world-size", str(10**20)], 2, "error: --world-size must be from 1 to 256, not 1000"),
        (["--dry-run", *REPORT, "--world-size", "1e20"], 2, "error: argument --world-size: invalid int value: '1e20'"),
    ],
)
def test_command_exits_with_its_code_and_without_a_traceback(flags: list[str], code: int, words: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "scripts.base_train", *flags], cwd=APP, capture_output=True, text=True, check=False
    )
    assert result.returncode == code
    assert words in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
