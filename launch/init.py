"""The command line that writes a first config. It downloads nothing, overwrites nothing, and asks the dry run whether
what it wrote can be trained."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project

from murmuration.accounting.errors import DONE, RunError
from murmuration.accounting.escaping import escape_output
from murmuration.train.commands.exit_codes import complain


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="init.py",
        description="Write a first config for indexed data: python launch/init.py classify --data my-shards --out "
        "my.json. Batch, steps and noise follow from the number of records; the file names the recipe of each rule.",
        epilog="The file says what each key is; docs/config-reference.md lists all others.",
    )
    parser.add_argument("goal", choices=("classify", "caption", "mae"), help="what the model learns from the records")
    parser.add_argument("--data", required=True, metavar="SHARDS", help="the private records, indexed")
    parser.add_argument(
        "--held-out", metavar="SHARDS",
        help="public records to measure on while training, indexed; needs --public",
    )  # fmt: skip
    parser.add_argument(
        "--start", type=Path, metavar="WEIGHTS",
        help="a run, an export, a file or folder of released weights; needs --public",
    )  # fmt: skip
    parser.add_argument(
        "--public", action="store_true",
        help="your word, which the certificate repeats: nobody's privacy depends on --held-out and --start, or a "
        "promise of their own covers it",
    )  # fmt: skip
    parser.add_argument("--epsilon", type=float, default=8.0, metavar="E", help="privacy budget (default 8)")
    parser.add_argument(
        "--size", choices=("nano", "tiny", "small", "base", "large", "huge"),
        help="size of the encoder (default: that of --start, else small)",
    )  # fmt: skip
    parser.add_argument(
        "--image-size", type=int, metavar="PIXELS", help="side of the picture (default: that of --start, else 224)"
    )
    parser.add_argument(
        "--pixels", metavar="PIXELS",
        help='how the weights of --start want pixels normalised, where no file beside them says it: imagenet, half, or '
        '{"mean": [r, g, b], "std": [r, g, b]}',
    )  # fmt: skip
    parser.add_argument("--label", metavar="FIELD", help="classify: 'cls', or a field of the records' .json")
    parser.add_argument(
        "--multi-label", action="store_true",
        help="classify: --label is a field of the .json that lists any number of classes",
    )  # fmt: skip
    parser.add_argument(
        "--classes", metavar="FILE|N",
        help="classify: public list of the class names, one per line, or the number of classes if labels are numbers "
        "(default: classes.txt beside the shards)",
    )  # fmt: skip
    parser.add_argument(
        "--classes-public", action="store_true",
        help="classify: your word, which the certificate repeats, that names that pack took from the rows are public",
    )  # fmt: skip
    parser.add_argument(
        "--unit", metavar="NAME",
        help="what is protected as one: a unit that the index knows, or 'record' (default: what the index knows)",
    )  # fmt: skip
    parser.add_argument(
        "--trainable", choices=("head", "lora", "all"),
        help="classify: the head, in one pass; low-rank adapters; or all weights (default: all, "
        "unless the noise on all outweighs what so many records can teach at this epsilon; then the head)",
    )  # fmt: skip
    parser.add_argument(
        "--features", metavar="FOLDER",
        help="--trainable head: where the encoder's outputs are kept, as private as the records, for later runs too "
        "(default: in the run's secret folder)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", metavar="NAME|FILE", help="caption: see docs/sources.md (default: that of --start, else clip)"
    )
    parser.add_argument("--out", type=Path, default=Path("my.json"), metavar="FILE", help="default: my.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    from murmuration.data.index.open import require_index
    from murmuration.data.store.place import ShardError
    from murmuration.train.config.section import RecipeError

    try:
        if arguments.out.exists():
            raise RecipeError(f"{arguments.out} exists, and nothing is overwritten; name another file with --out")
        if arguments.multi_label and (arguments.goal != "classify" or arguments.label is None):
            raise RecipeError("--multi-label is for classify, and needs --label, the field that lists the classes")
        if arguments.trainable in ("head", "lora") and (arguments.goal != "classify" or arguments.start is None):
            raise RecipeError(
                f"--trainable {arguments.trainable} is for classify, and needs --start, the weights of the encoder "
                "that stays as it is"
            )
        if arguments.image_size is not None and arguments.image_size < 1:
            raise RecipeError(
                f"--image-size {arguments.image_size} is no side of a picture; give its pixels, such as 224"
            )
        if not arguments.epsilon > 0:
            raise RecipeError(f"--epsilon {arguments.epsilon:g} is no privacy budget; give a number above 0, such as 8")
        named = [f"--{name}" for name in ("held-out", "start") if getattr(arguments, name.replace("-", "_"))]
        if named and not arguments.public:
            raise RecipeError(
                f"{' and '.join(named)}: only what is public may be used without noise; add --public, your word that "
                "nobody's privacy depends on it, or leave it out (records held out of the private ones are private)"
            )
        for option, source in {"--data": arguments.data, "--held-out": arguments.held_out}.items():
            try:
                require_index(source or arguments.data)
            except ShardError as error:
                raise RecipeError(f"{option}: {error}") from None
        # Only now: it brings PyTorch along.
        from murmuration.launch.first_config import ConfigRequest, compose, told

        asked = ConfigRequest(
            **{name: value for name, value in vars(arguments).items() if name not in ("out", "public")},
            out=arguments.out,
        )
        text, why = compose(asked)
        try:
            with arguments.out.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise RecipeError(f"{arguments.out} cannot be written ({error.strerror}); name another --out") from None
        try:
            lines = told(asked, why)
        except BaseException:
            os.unlink(arguments.out)
            raise
    except RunError as error:
        return complain(error)
    print("\n".join(lines))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
