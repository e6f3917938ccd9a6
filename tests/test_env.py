"""Environment variables are read loudly: a value that means nothing is an error."""

from __future__ import annotations

from pathlib import Path

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


def test_cache_folder_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HALFBYTE_CACHE", raising=False)
    assert env.cache_folder() == tmp_path / ".cache" / "halfbyte"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_folder() == tmp_path / "xdg" / "halfbyte"
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "own"))
    assert env.cache_folder() == tmp_path / "own"


def test_kv_integrity_is_off_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALFBYTE_KV_INTEGRITY", raising=False)
    assert env.kv_integrity() == "off"
    monkeypatch.setenv("HALFBYTE_KV_INTEGRITY", " RAISE ")
    assert env.kv_integrity() == "raise"
    monkeypatch.setenv("HALFBYTE_KV_INTEGRITY", "yes")
    with pytest.raises(UsageError, match="HALFBYTE_KV_INTEGRITY is 'yes'") as caught:
        env.kv_integrity()
    assert caught.value.hint == "set HALFBYTE_KV_INTEGRITY to off, log, abort or raise"
