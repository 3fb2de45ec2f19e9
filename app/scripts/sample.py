"""Let a trained model go on with a prompt: `python -m scripts.sample --prompt "def main"`."""

from __future__ import annotations

from lantrain.errors import UserError, run_main
from lantrain.flags import LARGEST, Parser, check_numbers

# Keys and values of 2^16 tokens are 2 GB at depth 8.
_RANGES: dict[str, tuple[float, float]] = {
    "num_samples": (1, 10_000), "max_tokens": (1, 2**16), "temperature": (0, 100), "top_k": (1, LARGEST),
    "seed": (0, LARGEST), "step": (0, LARGEST),
}  # fmt: skip
_COLDEST = 1e-3
"""Colder is 0 in all but name; by 1e-38 the logits would be divided to infinity, and nothing could be drawn."""


def main() -> int:
    """Print the prompt and its continuations."""
    parser = Parser(prog="python -m scripts.sample", description=__doc__)
    parser.add_argument("--prompt", default="def main", help="text to go on with")
    parser.add_argument("--num-samples", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--model-tag", default=None, help="folder under base_checkpoints (default: the deepest model)")
    parser.add_argument("--step", type=int, default=None, help="default: the newest")
    args = parser.parse_args()
    check_numbers(args, _RANGES)
    if 0 < args.temperature < _COLDEST:
        raise UserError(f"--temperature {args.temperature:g} is below {_COLDEST:g}", "use 0 for the likeliest token")
    # After the arguments are checked: torch takes seconds to load.
    from lantrain.training.sample import complete, load_for_sampling

    model, tokenizer, which = load_for_sampling(args.model_tag, args.step)
    print(f"[{which}]")
    for index in range(args.num_samples):
        text = complete(
            model, tokenizer, args.prompt, max_tokens=args.max_tokens, temperature=args.temperature,
            top_k=args.top_k, seed=args.seed + index,
        )  # fmt: skip
        print(text if index == args.num_samples - 1 else text + "\n---")
    return 0


if __name__ == "__main__":
    run_main(main)
