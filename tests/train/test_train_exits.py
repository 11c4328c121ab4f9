"""What the end of a command says of the next one: a run goes on, an audit or a study begins anew."""

from __future__ import annotations

import errno

import pytest
import torch.distributed as dist

from data.tar import UnreadableError
from train.exits import BAD_INPUT, FROM_THE_START, RESUME_ME, guarded
from train.stop import Stopped


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
    assert " again to go on\n" in "".join(capsys.readouterr())
    assert guarded(act, True, FROM_THE_START) == code
    assert " again from the start\n" in "".join(capsys.readouterr())
