"""Messages of errors: bounded whatever they quote, the same after a journey between processes."""

from __future__ import annotations

import pickle

from data.errors import DataError
from erase_rec.errors import MAX_CHARACTERS, MAX_NAME, ConfigError, UserError, nearest, shortened


def test_a_short_message_is_as_it_was_given() -> None:
    assert str(UserError("a.yaml:3: seed: expected a number")) == "a.yaml:3: seed: expected a number"


def test_the_middle_of_a_long_message_is_left_out() -> None:
    message = str(DataError(f"log.csv, line 7: {'x' * 10**6}; mend the line"))
    assert len(message) < MAX_CHARACTERS + 10
    assert message.startswith("log.csv, line 7: xxx")
    assert message.endswith("xxx; mend the line")
    assert " [...] " in message
    assert shortened("abcdefgh", 8) == "abcdefgh"


def test_of_many_problems_the_first_are_shown_and_all_are_kept() -> None:
    error = ConfigError([f"c.yaml:{line}: key{line}: unknown key {'k' * 5000}" for line in range(1, 201)])
    assert len(error.problems) == 200
    lines = str(error).split("\n  - ")
    assert lines[0] == "200 problems in the configuration:"
    assert lines[-1] == "and 150 more"
    assert len(lines) == 52
    assert max(map(len, lines)) < MAX_CHARACTERS / 2


def test_errors_are_the_same_on_the_other_side_of_a_process() -> None:
    for error in (UserError("one"), DataError("two"), ConfigError(["a.yaml:1: three", "b.yaml:2: four"])):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert getattr(again, "problems", None) == getattr(error, "problems", None)


def test_a_name_that_goes_on_and_on_is_no_misspelt_one() -> None:
    assert nearest("sed", ["seed"]) == "; did you mean 'seed'?"
    assert nearest("seed" * MAX_NAME, ["seed" * MAX_NAME + "s"]) == ""
