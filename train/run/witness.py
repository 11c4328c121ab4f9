"""Reports the ledger's head to an outside witness, so that it cannot be rewritten later, not even by the key's owner.

A URL gets a POST, a command gets a line on its standard input: the run, the ledger's length, the hash of its last line,
and what it charges, all of which are public. A web service, a time-stamping authority (RFC 3161), a commit to a remote
repository or a transparency log can keep it; `account.py verify --witness FILE` compares. The witness learns when
checkpoints were made.
"""

from __future__ import annotations

import http.client
import json
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from murmuration.accounting.ledger.facts import Head
from murmuration.train.config.root import WITNESS_URLS

SECONDS = 20


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive elsewhere as a GET without the line: every 3xx is an error."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


@dataclass(frozen=True)
class Witness:
    """`target` is a URL or a command. A witness that cannot be reached is reported, and does not end the run."""

    target: str
    say: Callable[[str], None]

    def __call__(self, head: Head) -> None:
        try:
            self._tell(json.dumps(head.as_dict()).encode() + b"\n")
        except (OSError, ValueError, IndexError, http.client.HTTPException, subprocess.SubprocessError) as error:
            self.say(f"ledger line {head.length} could not be reported to the witness: {_reason(error)}")

    def _tell(self, line: bytes) -> None:
        if self.target.startswith(WITNESS_URLS):
            request = urllib.request.Request(self.target, line, {"Content-Type": "application/json"}, method="POST")
            with urllib.request.build_opener(_Stay).open(request, timeout=SECONDS):
                return
        subprocess.run(shlex.split(self.target), input=line, timeout=SECONDS, check=True, capture_output=True)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"its command ended with {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return "no answer in time"
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}{', a redirect, which is not followed' if 300 <= error.code < 400 else ''}"
    # Its text may contain the address, which is often all that one needs to write there.
    told = error.reason if isinstance(error, urllib.error.URLError) else error
    return f"{type(told).__name__}{f' {told.errno}' if isinstance(told, OSError) and told.errno else ''}"
