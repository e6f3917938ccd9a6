"""Policies of the package, of one's own, and what is none."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from halfbyte.errors import UsageError
from halfbyte.evals.policy import NAMES, POLICY_SCHEMA, load_policy

OWN = """
schema_version: 1
name: ours
description: stricter
rule: paired
margin: 0.5
primary: {sums: "acc,none"}
"""


@pytest.mark.parametrize("name", NAMES)
def test_policies_of_the_package(name: str) -> None:
    policy = load_policy(name)
    assert (policy.name, policy.schema_version) == (name, POLICY_SCHEMA)
    assert policy.exact_margin == Fraction(4, 5)
    assert load_policy(name, 0.3).exact_margin == Fraction(3, 10)


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(OWN)
    policy = load_policy(str(path))
    assert (policy.margin, policy.task_margin, policy.decimals) == (0.5, 2.0, None)
    assert policy.primary == {"sums": "acc,none"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("schema_version: 1", "schema_version: 2"), "schema_version is 2, this version reads 1"),
        (("rule: paired", "rule: strict"), "rule is 'strict', not paired or plain"),
        (("margin: 0.5", "margin: 101"), "margin is 101.0; it must be from 0 to 100"),
        (("margin: 0.5", "margin: much"), "margin: expected a number, found 'much'"),
        (("margin: 0.5", "margin: .nan"), "margin: nan is not a finite number"),
        (("margin: 0.5", ""), "margin: missing field"),
        (("margin: 0.5", "margin: 0.5\nconfidence: 1"), "confidence is 1.0, not between 0 and 1"),
        (("margin: 0.5", "margin: 0.5\ndecimals: -1"), "decimals is -1; it must be from 0 to 10"),
        (("name: ours", "name: ours\nmargins: 1"), "margins: unknown field"),
        (("primary: {", "primary: ["), "expected ',' or ']'"),
        ((OWN, "- 1"), "expected an object"),
    ],
)
def test_what_is_no_policy(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(UsageError) as caught:
        load_policy(str(path))
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml: .*No such file"):
        load_policy(str(tmp_path / "absent.yaml"))
    with pytest.raises(UsageError, match="there is no such policy") as caught:
        load_policy("lenient")
    assert caught.value.hint == "choose default or article, or name a file: --policy FILE.yaml"
