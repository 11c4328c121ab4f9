"""Texts of golden values, with everything left out that may rightly differ."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from tests.golden.commands import ROOT

# What is replaced before texts are compared, because it depends on times, places or chance and not on what the code
# does: the folder that everything is made in; measured rates and times; random names inside pictures; hosts, processes
# and times in names of event files; whether DeepSpeed compiled its operation just now; and the hash of a config that
# holds absolute paths, with the signature over it. Events themselves, which hold times, and the inode numbers of
# identity.json are not compared.
# Nothing is replaced in ledgers and checkpoints: they hold no time and no path, and the versions of packages in them
# are those of the one environment in which two commits are compared.
NORMALISED = (
    (re.compile(r'("samples_per_second": )[-+.\de]+'), r"\1<rate>"),
    (re.compile(r"[\d,.]+ samples/s"), "<rate> samples/s"),
    (re.compile(r"ETA [\dhms]+"), "ETA <time>"),
    (re.compile(r"(config_sha256\W+)[0-9a-f]{64}"), r"\1<depends on paths>"),
    (re.compile(r'("value": ")[0-9a-f]{128}"'), r'\1<signs that, too>"'),
    (re.compile(r"\b([mp])[0-9a-f]{10}\b"), r"\1<id>"),
    (re.compile(r"<dc:date>[^<]*"), "<dc:date><time>"),
    (re.compile(r'("last_start\W+|last started on )[-\d]{10}'), r"\1<day>"),
    (re.compile(r'("id": ")[0-9a-f]{16}"'), r'\1<random>"'),  # of run_state.json
    (re.compile(r"events\.out\.tfevents\.\S+"), "events.out.tfevents.<host>"),
    (re.compile(r"in [\d.]+ s\b"), "in <time>"),
    (re.compile(r"noise [\d.,]+ m?s beside"), "noise <time> beside"),
    (re.compile(r"^DeepSpeed (compiles|\S+ built) .*\n", re.MULTILINE), ""),
)  # fmt: skip


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def normalised(text: str, folder: Path) -> str:
    for place, name in ((folder, "<folder>"), (folder.resolve(), "<folder>"), (ROOT, "<project>")):
        text = text.replace(str(place), name)
    for pattern, replacement in NORMALISED:
        text = pattern.sub(replacement, text)
    return text


def as_json(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def of_file(path: Path, folder: Path) -> str:
    content = path.read_bytes()
    about = f"{len(content)} bytes, sha256 {digest(content)}\n"
    try:
        return about + content.decode() if len(content) < 20_000 else about
    except UnicodeDecodeError:
        return about
