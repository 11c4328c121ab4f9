"""The run signs its certificate: nobody without the run key can change the certificate or the ledger afterwards.

The signing key is derived from the run key, its public half is in the ledger's first line, and it is destroyed with the
run key once the certificate is signed. So a later forger cannot rewrite a run whose public key is known from another
source (the log of runs, a witness); replacing the key in the first line as well makes it a different run.
"""

from __future__ import annotations

import json
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from murmuration.accounting.keys import RunKey

ALGORITHM = "Ed25519"


def public_key(key: RunKey) -> str:
    return _private(key).public_key().public_bytes_raw().hex()


def signed(document: dict[str, Any], key: RunKey) -> dict[str, Any]:
    value = _private(key).sign(_message(document)).hex()
    return {**document, "signature": {"algorithm": ALGORITHM, "public_key": public_key(key), "value": value}}


def fault_of(document: dict[str, Any], signer: str) -> str | None:
    """Why the document is not signed by the key that the ledger names; None if it is."""
    signature = document.get("signature")
    if signature is None:
        return "carries no signature, although its run signs"
    if (signature["algorithm"], signature["public_key"]) != (ALGORITHM, signer):
        return "is signed by another key than the one in the ledger's first line"
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)).verify(
            bytes.fromhex(signature["value"]), _message(document)
        )
    except (InvalidSignature, ValueError):
        return "was changed after it was signed"
    return None


def _private(key: RunKey) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(key.derive("signature", 0, "-"))


def _message(document: dict[str, Any]) -> bytes:
    content = {name: value for name, value in document.items() if name != "signature"}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
