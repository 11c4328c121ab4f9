"""use WHAT PICTURE...: captions, classes, names or features of your own pictures, by a trained model.

WHAT is an export, a run directory (its last checkpoint), or anything else that evaluate takes, but for AlexNet. A
PICTURE is a file or a folder of them. A captioner writes captions, or says which of some names fits best; a classifier
gives its likeliest classes; a masked autoencoder fills in hidden patches. Pictures that cannot be read are named and
skipped; the exit code is 2 if none can be.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing the project

from murmuration.accounting.errors import BAD_INPUT, DONE, RunError
from murmuration.accounting.escaping import escape_output, printable, sentence

FEATURES = (".npz", ".npy")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="use.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", type=Path, help="export or run directory")
    parser.add_argument("pictures", type=Path, nargs="+", help="files, or folders of pictures")
    parser.add_argument(
        "--best", action="store_true", help="a run's best checkpoint by run.keep_best, not its last one"
    )
    words = parser.add_argument_group("captioners")
    words.add_argument("--beam", type=int, default=1, metavar="N", help="search with N beams (default 1: greedy)")
    words.add_argument("--names", nargs="+", default=[], metavar="NAME", help="rank these by how well each would fit")
    words.add_argument("--names-file", type=Path, help="with one name per line, likewise")
    words.add_argument("--template", help='with {} for the name (default: "this is a photo of a {}", or shorter)')
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON in place of a table")
    out.add_argument("--features", type=Path, metavar="FILE", help="write features: .npz with names, or .npy")
    out.add_argument("--page", type=Path, metavar="HTML", help="write a page that contains the pictures")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    try:
        from murmuration.evaluation.errors import EvaluationError
        from murmuration.evaluation.models.subject import Subject

        if arguments.features is not None and arguments.features.suffix not in FEATURES:
            raise EvaluationError(f"--features {arguments.features}: end the name with {' or '.join(FEATURES)}")
        if arguments.beam < 1:
            raise EvaluationError(f"--beam {arguments.beam} searches nothing; give 1 or more")
        Subject.at(arguments.what, best=arguments.best)  # a wrong path is answered before torch is imported
        names = _names(arguments)
        from murmuration.evaluation.models.load import load
        from murmuration.evaluation.use import PredictionOptions, pictures_in, say, write_features, write_page

        pictures = pictures_in(arguments.pictures)
        model = load(arguments.what, best=arguments.best)
        wanted = PredictionOptions(arguments.beam, names, arguments.template)
        said = say(model, pictures, wanted, arguments.features is not None, arguments.page is not None)
        for name, why in said.bad.items():
            print(printable(f"{name} was skipped: {why}"), file=sys.stderr)
        if not said.rows:
            raise EvaluationError(f"none of the {len(pictures)} pictures can be read; name others")
        if arguments.features is not None:
            write_features(said, arguments.features)
        if arguments.page is not None:
            write_page(model, said, arguments.page)
        print(json.dumps(said.as_dict(), indent=2) if arguments.json else said.table())
        return DONE
    except (RunError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, RunError) else BAD_INPUT


def _names(arguments: argparse.Namespace) -> tuple[str, ...]:
    from murmuration.evaluation.errors import EvaluationError

    found = [*arguments.names]
    if arguments.names_file is not None:
        try:
            found += arguments.names_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(
                f"--names-file {arguments.names_file} cannot be read ({error}); name another"
            ) from None
    return tuple(dict.fromkeys(name.strip() for name in found if name.strip()))


if __name__ == "__main__":
    sys.exit(main())
