"""What the end of a command says of the next one: a run goes on, an audit or a study begins anew."""

from __future__ import annotations

import errno

import pytest
import torch.distributed as dist
from safetensors import SafetensorError

from murmuration.accounting.certificate.verify import CertificateError
from murmuration.accounting.epsilon.audit_bound import AuditError
from murmuration.accounting.epsilon.composition import NotConverged
from murmuration.accounting.errors import BAD_INPUT, BUDGET_SPENT, REFUSED, RESUME_ME, SELF_TEST_FAILED
from murmuration.accounting.keys import KeyFileError
from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.data.store.place import ShardError, UnreadableError
from murmuration.data.store.remote import ChangedShardError
from murmuration.train.clip.rule import ClipError
from murmuration.train.commands.exit_codes import FROM_THE_START, complain, guarded
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.ranks import Disagreement
from murmuration.train.distributed.stop import Stopped
from murmuration.train.engines.shard_map import ShardMapError
from murmuration.train.noise.update import UpdateError
from murmuration.train.recipe.warm_start import WarmStartError
from murmuration.train.self_test.self_test import SelfTestError
from murmuration.train.storage.checkpoint import CheckpointError, PointerError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Stopped("SIGTERM"), RESUME_ME),
        (UnreadableError("shard-3.tar cannot be read; restore access"), RESUME_ME),
        (dist.DistBackendError("the other side closed"), RESUME_ME),
        (OSError(errno.ENOSPC, "No space left on device"), BAD_INPUT),
    ],
)
def test_a_message_says_what_the_next_start_does(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def act() -> int:
        raise error

    assert guarded(act, True) == code
    assert " again to continue\n" in "".join(capsys.readouterr())
    assert guarded(act, True, FROM_THE_START) == code
    assert " again from the start\n" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        (BUDGET_SPENT, [BudgetSpent]),
        (SELF_TEST_FAILED, [SelfTestError, UpdateError, ShardMapError]),
        (REFUSED, [LedgerError, CheckpointError, PointerError, KeyFileError, Disagreement]),
        (
            BAD_INPUT,
            [
                RecipeError, WarmStartError, ShardError, ChangedShardError, ClipError, NotConverged, AuditError,
                CertificateError, SafetensorError,
            ],
        ),
    ],
)  # fmt: skip
def test_each_error_ends_a_command_with_its_code_and_one_sentence(
    code: int, kinds: list[type[Exception]], capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in kinds:

        def act(kind: type[Exception] = kind) -> int:
            raise kind("what is wrong; what to do")

        assert guarded(act, True) == code, kind
        assert capsys.readouterr().err == "error: what is wrong; what to do\n"


def test_an_error_without_words_is_told_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert complain(TimeoutError()) == BAD_INPUT
    assert capsys.readouterr().err.startswith("error: TimeoutError")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError])
def test_a_mistake_in_the_program_keeps_its_traceback(kind: type[Exception]) -> None:
    def act() -> int:
        raise kind("nobody expected this")

    with pytest.raises(kind):
        guarded(act, True)
