"""Environment variables are read loudly: a value that means nothing is an error."""

from __future__ import annotations

import pytest

from halfbyte import env
from halfbyte.errors import UsageError


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("TRUE", True), ("0", False), ("", False), ("off", False)]
)
def test_switch(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("HALFBYTE_DEBUG", value)
    assert env.debug() is expected


def test_switch_refuses_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_DEBUG", "please")
    with pytest.raises(UsageError, match="HALFBYTE_DEBUG is 'please'") as caught:
        env.debug()
    assert caught.value.hint == "set HALFBYTE_DEBUG=1 or HALFBYTE_DEBUG=0"
