"""export RUN_DIR OUT: writes the weights and their certificate, and never the run key.

With --from-deepspeed, RUN_DIR is a checkpoint folder of DeepSpeed, whose weights become OUT/model.safetensors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from murmuration.accounting.errors import BAD_INPUT, DONE, RunError
from murmuration.accounting.escaping import escape_output, sentence


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="export.py", description="Weights and certificate for release.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet, outside the run directory")
    parser.add_argument("--best", action="store_true", help="the best checkpoint by run.keep_best, not the last one")
    parser.add_argument(
        "--form", choices=("safetensors", "pytorch", "deepspeed", "timm", "hf", "peft", "vip", "dpcap"),
        default="safetensors",
        help="safetensors (default), pytorch and deepspeed: all weights, as evaluate, use and later runs read them; "
        "timm, hf: a folder that timm or transformers loads; peft: low-rank adapters; vip, dpcap: a file as published "
        "with these papers",
    )  # fmt: skip
    parser.add_argument(
        "--averaged", action="store_true", help="of timm, hf, peft, vip and dpcap: the averages of the weights"
    )
    parser.add_argument(
        "--licence",
        default="unknown",
        help='for the model card of timm, hf, peft, vip and dpcap: apache-2.0, "other", …',
    )
    parser.add_argument(
        "--from-deepspeed", action="store_true", help="import: RUN_DIR is a checkpoint folder that DeepSpeed wrote"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    if not arguments.from_deepspeed and not (arguments.run_dir / "ledger.jsonl").is_file():
        # Here, since what exports takes seconds to import.
        told = f"error: {arguments.run_dir} has no ledger.jsonl; name the run directory of a finished run"
        print(sentence(told), file=sys.stderr)
        return BAD_INPUT
    from murmuration.train.export.export import export, from_deepspeed

    try:
        if arguments.from_deepspeed:
            written = from_deepspeed(arguments.run_dir, arguments.out)
        else:
            written = export(
                arguments.run_dir, arguments.out, arguments.form, arguments.best, arguments.averaged, arguments.licence
            )
        for path in written:
            print(path)
        return DONE
    except (RunError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, RunError) else BAD_INPUT
