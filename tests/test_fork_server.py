"""What is forked behaves like a process that was started: to whoever waits for it, kills it, or reads what it says."""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import forking
from tests.support.launching import ROOT, alive, environment, opened_steps, wait_for

PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def code(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


ENDINGS = [
    "pass", "import sys; sys.exit(75)", "import sys; sys.exit('a sentence')", "import sys; sys.exit(None)",
    "import sys; sys.exit(256 + 3)", "raise ValueError('what went wrong')", "import os; os._exit(9)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "raise KeyboardInterrupt",
    "import atexit; atexit.register(print, 'at the end', flush=True); print('first')",
    "import atexit; atexit.register(print, 'after an error'); 1 / 0",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('a thread'))).start()",
    "import sys; print(sys.argv, __name__, sys.path[0]); print('more', file=sys.stderr)",
    "import signal as s; print([s.getsignal(n) for n in (s.SIGCHLD, s.SIGTERM, s.SIGINT, s.SIGPIPE)])",
    "import signal as s; print(s.pthread_sigmask(s.SIG_BLOCK, []), s.set_wakeup_fd(-1))",
    "import sys; print(sys.stdin.read().upper())", "import torch; print(torch.get_num_threads())",
]  # fmt: skip


@pytest.mark.parametrize("program", ENDINGS)
def test_it_ends_and_speaks_as_a_fresh_interpreter_does(program: str) -> None:
    found, expected = (
        run(code(program, "an argument"), capture_output=True, text=True, input="given", env=environment())
        for run in (forking.run, subprocess.run)
    )
    assert found.returncode == expected.returncode and found.stdout == expected.stdout
    # Of a traceback the last line: above it stand frames of the server.
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_a_script_and_a_module_are_the_main_one(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'imported'\n")
    (tmp_path / "said.py").write_text(
        "import sys, beside\nprint(__name__, sys.argv[1:], beside.word, len(sys.argv[0]) > 0)"
    )
    for command in (["said.py", "x"], ["-m", "said", "x"]):
        done = forking.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "__main__ ['x'] imported True\n"


def test_environment_folder_and_limits_are_its_own_and_whole(tmp_path: Path) -> None:
    """`environ` of C libraries, too; and nothing of the test's that was not given."""
    program = (
        "import os, resource, ctypes; get = ctypes.CDLL(None).getenv; get.restype = ctypes.c_char_p\n"
        "print(sorted(os.environ), get(b'ONLY'), get(b'HOME'), os.getcwd(), resource.getrlimit(resource.RLIMIT_FSIZE))"
    )
    limits = {resource.RLIMIT_FSIZE: 4096}
    # What is read at import is the server's, where the machine sets any of it.
    env = {"ONLY": "this"} | {name: os.environ[name] for name in forking.READ_AT_IMPORT if name in os.environ}
    done = forking.run(code(program), env=env, cwd=tmp_path, limits=limits, capture_output=True, text=True)
    assert done.stdout == f"{sorted(env)} b'this' None {tmp_path} (4096, 4096)\n", done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_no_two_draw_the_same_by_chance() -> None:
    program = "import random, numpy, torch; print(random.random(), numpy.random.random(), float(torch.rand(())))"
    drawn = [forking.run(code(program), capture_output=True, text=True).stdout.split() for _ in range(2)]
    assert len(drawn[0]) == 3 and not set(drawn[0]) & set(drawn[1])


def test_what_only_a_fresh_interpreter_can_be_is_refused() -> None:
    for env in ({"ATEN_CPU_CAPABILITY": "default"}, {"LD_PRELOAD": "x.so"}, {"PYTHONHASHSEED": "3"}):
        with pytest.raises(ValueError, match="start a fresh interpreter"):
            forking.run(code("pass"), env=environment() | env)
    for command in (["sh", "-c", "true"], [sys.executable, "-I", "-c", "pass"]):
        with pytest.raises(ValueError, match="can be forked"):
            forking.run(command)


def test_output_is_read_while_it_runs_and_in_its_order() -> None:
    program = "import sys\nfor line in sys.stdin:\n    print(line.strip(), flush=True); print('!', file=sys.stderr)"
    streams = PIPES | {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with forking.start(code(program), **streams) as process:
        for word in ("one", "two"):
            process.stdin.write(word + "\n")
            process.stdin.flush()
            assert [process.stdout.readline() for _ in range(2)] == [word + "\n", "!\n"]
        assert process.poll() is None
        process.stdin.close()
        assert process.stdout.read() == "" and process.wait(60) == 0


def test_signals_stops_and_timeouts_reach_it() -> None:
    program = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True))\nprint(0, flush=True)\nwhile True: time.sleep(0.01)"  # noqa: E501
    process = forking.start(code(program), **PIPES)
    assert process.stdout.readline() == "0\n"
    assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid != os.getsid(0)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "heard\n"
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    process.send_signal(signal.SIGCONT)
    process.terminate()
    assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        forking.run(code("import time; time.sleep(600)"), timeout=0.1)


RANK = """
import os, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
told = " ".join(os.environ[name] for name in names)
os.write(1, f"{told} {os.environ['MASTER_PORT'].isdigit()}\\n".encode())  # at once: another rank writes, too
"""


def test_ranks_are_told_apart_and_share_a_session() -> None:
    with forking.start(code(RANK + "os.write(1, b'%d\\n' % os.getsid(0))"), ranks=3, **PIPES) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and process.codes == [0, 0, 0], errors
    said = sorted(line for line in output.splitlines() if "127.0.0.1" in line)
    assert said == [f"{rank} {rank} 3 3 127.0.0.1 True" for rank in range(3)]
    assert output.splitlines().count(str(process.pid)) == 3


@pytest.mark.parametrize(
    ("ending", "own", "whole"),
    [("os.kill(os.getpid(), 9)", -9, 1), ("sys.exit(5)", 5, 5)],
)
def test_a_rank_that_fails_ends_the_others(ending: str, own: int, whole: int) -> None:
    program = f"{RANK}\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(600)"
    with forking.start(code(program), ranks=2, **PIPES) as process:
        process.communicate(timeout=300)
    assert process.codes is not None and process.codes[1] == own
    assert process.codes[0] in (-signal.SIGKILL, -signal.SIGTERM) and process.returncode == whole
    assert not any(alive(pid) for pid in process.pids)


def test_a_signal_to_their_launcher_reaches_every_rank_and_a_kill_of_the_group_leaves_none() -> None:
    process = forking.start(code(RANK + "time.sleep(600)"), ranks=2, **PIPES)
    assert process.stdout.readline() and process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.codes == [-signal.SIGTERM, -signal.SIGTERM] and process.returncode == 1

    process = forking.start(code(RANK + "time.sleep(600)"), ranks=2, **PIPES)
    assert process.stdout.readline() and process.stdout.readline()
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and process.codes is None and output == ""
    wait_for_none(process.pids)


def wait_for_none(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} were never reaped"
        time.sleep(0.01)


def test_no_zombie_and_no_descriptor_stays_and_their_time_is_counted() -> None:
    """Neither in the server nor in what it forks, nor here."""

    def open_in(pid: int | str) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def comes_to(count: int) -> bool:
        """The server closes what a process left only when it looks again."""
        deadline = time.monotonic() + 60
        while open_in(own) > count and time.monotonic() < deadline:
            time.sleep(0.01)
        return open_in(own) <= count

    own = forking.server().process.pid
    listing = "import os; print(len(os.listdir('/proc/self/fd')))"
    first = forking.run(code(listing), capture_output=True, text=True).stdout
    here, there = open_in("self"), open_in(own)
    for _ in range(3):
        forking.run(code(RANK), ranks=2, capture_output=True)
        still = forking.start(code("import time; time.sleep(600)"))
        assert forking.run(code(listing), capture_output=True, text=True).stdout == first, "it holds what is another's"
        still.kill()
        still.wait()
        wait_for_none([still.pid])
    assert comes_to(there)
    assert open_in("self") <= here
    seconds = forking.seconds()
    forking.run(code("import time\nwhile time.process_time() < 0.5: pass"))
    assert forking.seconds() - seconds >= 0.4


def test_what_still_runs_ends_with_its_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forking, "server", functools.cache(forking.Server))
    script = tmp_path / "account.py"  # of which the server knows that it needs no imports
    script.write_text("import time; time.sleep(600)")
    process = forking.start([sys.executable, script])
    forking.server().close()
    with pytest.raises(RuntimeError, match="the fork server has ended"):
        process.wait(60)
    wait_for_none([process.pid])


HOLD = """
import sys
from pathlib import Path
from murmuration.train.distributed.stop import StopRequest
from tests.support.acc_world import begin, facts, train
folder = Path(sys.argv[1])
request, journal = StopRequest(folder / "stop"), begin(folder)
train(journal, range(1, 6))
print(request.raised())
"""


def test_the_rank_that_keeps_the_ledger_waits_until_it_is_killed_or_asked_to_stop(tmp_path: Path) -> None:
    def held(folder: Path) -> forking.Forked:
        folder.mkdir()
        process = forking.start(code(HOLD, str(folder)), cwd=ROOT, hold_after_opened=3, **PIPES)
        wait_for(lambda: opened_steps(folder) == [1, 2, 3], process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        return process

    for way in ("file", "signal"):
        process = held(tmp_path / way)
        if way == "file":
            (tmp_path / way / "stop").touch()
        else:
            process.terminate()
        output, errors = process.communicate(timeout=60)
        assert output == ("the file stop\n" if way == "file" else "SIGTERM\n"), errors
        assert opened_steps(tmp_path / way) == [1, 2, 3, 4, 5]
    process = held(tmp_path / "kill")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and opened_steps(tmp_path / "kill") == [1, 2, 3]
