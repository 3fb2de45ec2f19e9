"""The whole of lantrain on one machine in a few minutes: `make demo`.

Real text from Python's own library, a tokenizer, a depth-4 GPT trained by one rank for a while and by two ranks for a
hundred steps, then the comparison, the loss curve and a few lines from the model. Each rank gets half of the cores, as
if it were a machine of its own; so one rank shows what half of this machine does. What is done is skipped.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from lantrain import paths
from lantrain.cluster.cores import usable_cores
from lantrain.errors import UserError, run_main
from lantrain.training.report import comparison_table, plot_losses, read_run

STEPS, ONE_RANK_STEPS = 100, 20
TRAIN_FLAGS = (
    "--device-type cpu --depth 4 --max-seq-len 512 --device-batch-size 2 --total-batch-size 2048 "
    f"--num-iterations {STEPS} --eval-every 50 --sample-every -1 --core-metric-every -1 --tracker none --resume auto"
)
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps{postfix}"
PROMPTS = ("def main(", "import os\n", "Return the")


def _heading(number: int, text: str) -> None:
    print(f"\n[{number}/6] {text}", flush=True)


def _call(arguments: list[str], extra: dict[str, str] | None = None) -> None:
    """Run a command of ours in this interpreter; raise UserError, exit code kept, when it fails."""
    result = subprocess.run([sys.executable, "-m", *arguments], env={**os.environ, **(extra or {})}, check=False)
    if result.returncode:
        raise UserError(f"the demo stopped: {arguments[0]} failed", "see the lines above", result.returncode)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _train(ranks: int, tag: str, last_step: int, threads: int) -> None:
    """Train `tag` with `ranks` processes up to `last_step`, with a progress bar; the full log is beside the shards."""
    if (paths.checkpoint_dir(tag) / f"complete_{last_step:06d}.json").exists():
        print(f"already trained: {paths.checkpoint_dir(tag)}")
        return
    trainer = ["scripts.base_train", "--", *shlex.split(TRAIN_FLAGS), "--model-tag", tag, "--run", tag]
    if ranks == 1:
        trainer.remove("--")
        command = [sys.executable, "-m", *trainer, "--stop-after", str(last_step)]
    else:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={ranks}",
            "--master_addr=127.0.0.1", f"--master_port={_free_port()}", "--max-restarts=0", "-m", *trainer,
        ]  # fmt: skip
    log = paths.base_dir() / f"{tag}.log"
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with (
        open(log, "a") as log_file,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        # A bar that redraws itself is for terminals; a log gets every tenth step's line.
        tqdm(total=last_step, unit="step", dynamic_ncols=True, disable=None, bar_format=BAR) as bar,
    ):
        assert process.stdout is not None
        tail: list[str] = []
        for line in process.stdout:
            log_file.write(line)
            tail = [*tail[-7:], line.rstrip()]
            if line.startswith("step "):
                fields = dict(part.strip().split(": ", 1) for part in line.split("|") if ": " in part)
                step = int(line[5:10])
                bar.set_postfix_str(f"loss {fields['loss']}, {fields['tok/sec']} tok/s, eta {fields['eta'].strip()}")
                bar.update(step - bar.n)
                if bar.disable and (step % 10 == 0 or step == 1):
                    print(line.rstrip(), flush=True)
            elif line.startswith(("Step ", "error:", "warning:", "--resume", "Peak ")):
                bar.write(line.rstrip(), file=sys.stdout)
        code = process.wait()
    if code:
        raise UserError(f"training with {ranks} ranks failed: {' / '.join(tail[-3:])}", f"the whole log: {log}", code)


def main() -> int:
    """Run the six parts of the demo, each skipped when it is done."""
    started = time.monotonic()
    paths.base_dir().mkdir(parents=True, exist_ok=True)
    threads = max(1, usable_cores() // 2)
    _heading(1, "Text: the sources of this Python's standard library, as parquet shards")
    _call(["scripts.prepare_data", "--source", "sample"])
    _heading(2, "Tokenizer: 32768 tokens, learned from that text")
    _call(["scripts.tok_train"])
    _heading(3, f"Training with 1 rank, {threads} thread(s), {ONE_RANK_STEPS} of {STEPS} steps (to compare)")
    _train(1, "demo-1rank", ONE_RANK_STEPS, threads)
    _heading(4, f"Training with 2 ranks over Gloo, {threads} thread(s) each, {STEPS} steps")
    _train(2, "demo-2ranks", STEPS, threads)
    _heading(5, "What came out")
    runs = [
        read_run(name, paths.checkpoint_dir(tag) / "metrics.jsonl")
        for name, tag in (("1 rank", "demo-1rank"), ("2 ranks", "demo-2ranks"))
    ]
    print(comparison_table(runs))
    picture: Path = paths.base_dir() / "loss.png"
    plot_losses(runs, picture)
    print(f"loss curve: {picture}")
    _heading(6, "A few lines from the model (it has seen little, so expect little)")
    from lantrain.training.sample import complete, load_for_sampling

    model, tokenizer, which = load_for_sampling("demo-2ranks", None)
    print(f"[{which}]")
    for prompt in PROMPTS:
        print(complete(model, tokenizer, prompt, max_tokens=40, temperature=0.7, top_k=50) + "\n---")
    print(f"\nDone in {(time.monotonic() - started) / 60:.1f} minutes. More: make sample PROMPT='class'")
    return 0


if __name__ == "__main__":
    run_main(main)
