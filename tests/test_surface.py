"""What users rest on stays as the last release had it: keys, options, names, exit codes, forms."""

from __future__ import annotations

from fnmatch import fnmatchcase

from tests.surface import RELEASED, broken, experimental, surface


def test_nothing_that_a_release_promised_is_gone_or_has_another_default() -> None:
    gone = broken(RELEASED.read_text().splitlines(), surface())
    assert not gone, "\n".join(["docs/stability.md promises these; only a release may make the list anew:", *gone])


def test_what_went_and_what_changed_is_seen_and_what_was_added_is_not() -> None:
    now = surface()
    key, default = "config phases[].privacy.views = 1", "config phases[].privacy.views = 2"
    assert key in now and broken(now, [*now, "config phases[].privacy.new = 1"]) == []
    assert broken(now, [default if line == key else line for line in now]) == [key]
    word = 'config phases[].objective takes "text"'
    assert word in now and broken(now, [line for line in now if line != word]) == [word]
    for kind in ("config", "command", "library", "exit", "form"):
        line = next(line for line in now if line.startswith(f"{kind} "))
        assert broken(now, [each for each in now if each != line]) == [line]


def test_every_pattern_of_the_page_names_something() -> None:
    lines = RELEASED.read_text().splitlines()
    patterns = experimental()
    assert len(patterns) > 5
    for pattern in patterns:
        assert any(fnmatchcase(line, pattern.replace("[]", "[[]]")) for line in lines), pattern
