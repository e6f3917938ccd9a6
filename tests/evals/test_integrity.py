"""What makes two evaluations incomparable, on fabricated answers; and on real ones of the demo's
model, each defect made as it happens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.evals.gate import gate
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.integrity import defects, remarkable
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import (
    Answer,
    Divergence,
    EvalReport,
    Histogram,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
    TextMetrics,
    checkpoint_fingerprint,
)
from halfbyte.formats.checkpoint import open_checkpoint

POLICY = load_policy("default")
SETTINGS = TaskSettings(None, 16, 1024, "float32", {"lm_eval": "0.4.13"})
DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo"
MODEL = DEMO / "glm-nano-fp8"


def report(
    answers: Sequence[Answer], right: int, fingerprint: str = "f", name: str = "sums"
) -> EvalReport:
    count = len(answers)
    values = (1.0,) * right + (0.0,) * (count - right)
    items = tuple(Item(name, n, f"d{n}", "p", "t") for n in range(count))
    metrics = (MetricScores("acc", "none", True, values),)
    scores = TaskScores(name, "1", items, metrics, "hash", tuple(answers), (), "tokens")
    return EvalReport("folder", fingerprint, tasks=TaskResults(SETTINGS, (scores,)))


def texts(count: int, model: str, **changed: object) -> list[Answer]:
    """The first answers changed, so many as `some` says."""
    some = int(str(changed.pop("some", 0)))
    plain = [Answer(f"{model}{n}", tokens=50) for n in range(count)]
    return [answer._replace(**changed) for answer in plain[:some]] + plain[some:]


def choices(count: int, model: str, flat: int = 0) -> list[Answer]:
    return [Answer(f"{model}{n}", 4, 0.0 if n < flat else 2.0) for n in range(count)]


@pytest.mark.parametrize(
    ("some", "changed", "found"),
    [
        (4, {"unread": ("none",)}, []),
        (5, {"unread": ("none",)}, ["5 of the baseline's 200 answers could not be read, 2 % may"]),
        (9, {"unread": ("another filter",)}, []),
        (1, {"capped": True}, []),
        (
            2,
            {"capped": True},
            ["2 of the baseline's 200 answers reached the limit of tokens, 0.5 % may"],
        ),
    ],
)
def test_what_a_baseline_may_not_do_a_candidate_may(
    some: int, changed: dict[str, object], found: list[str]
) -> None:
    broken = report(texts(200, "a", some=some, **changed), 150)
    whole = report(texts(200, "b"), 150, "other")
    assert list(defects(broken, whole, POLICY)) == [f"task sums: {text}" for text in found]
    assert list(defects(whole, broken, POLICY)) == []
    (remark,) = remarkable(whole, broken) if found else [""]
    assert remark == (
        f"task sums: {found[0]}".replace("the baseline's ", "").split(", ")[0]
        + (", 0 of the baseline's")
        if found
        else ""
    )


def test_choices_without_log_probabilities_are_no_choices() -> None:
    good, bad = report(choices(100, "a"), 60), report(choices(100, "b", flat=2), 60, "other")
    said = "all choices of 2 of 100 items are equally likely in the {}"
    for pair, side in (((good, bad), "candidate"), ((bad, good), "baseline")):
        (defect,) = defects(*pair, POLICY)
        assert said.format(side) in defect
    assert not list(defects(good, report(choices(100, "b", flat=1), 60, "other"), POLICY))


@pytest.mark.parametrize(("right", "chance"), [(25, True), (32, True), (33, False)])
def test_a_baseline_at_chance_tells_nothing(right: int, chance: bool) -> None:
    """100 items of four choices: 25 by guessing, with a standard deviation of 4.33."""
    found = list(defects(report(choices(100, "a"), right), report(choices(100, "b"), 60), POLICY))
    assert bool(found) == chance
    assert not found or "where guessing gives 25.0 %" in found[0]
    # A candidate that fell to chance is for the gate to fail.
    fallen = gate(report(choices(1000, "a"), 600), report(choices(1000, "b"), 250, "o"), POLICY)
    assert fallen.verdict == "fail"


def test_a_baseline_without_a_right_answer_tells_nothing() -> None:
    for right, defective in ((0, 1), (1, 0)):
        pair = report(texts(50, "a"), right), report(texts(50, "b"), 0, "other")
        assert len(list(defects(*pair, POLICY))) == defective


@pytest.mark.parametrize(
    ("answers", "identical"),
    [
        (choices(20, "a"), True),
        (choices(19, "a"), False),
        (texts(200, "a"), True),
        (texts(199, "a"), False),
        (texts(200, "a", some=200, tokens=9), False),
    ],
)
def test_two_models_do_not_say_the_same(answers: list[Answer], identical: bool) -> None:
    right = len(answers) - 1
    one, other = report(answers, right), report(answers, right, "other")
    assert len(list(defects(one, other, POLICY))) == identical
    changed = report([*answers[:-1], answers[-1]._replace(sha256="x")], right, "other")
    assert not list(defects(one, changed, POLICY))
    assert not list(defects(one, one, POLICY))
    verdict = gate(one, one, load_policy("article"))
    assert verdict.verdict == "pass"
    assert verdict.remarks == (
        "both evaluations are of the same checkpoint, and identical: every answer is the same",
    )


def text(nll: float, kl: float | None = None, of: str = "f", tokens: str = "t") -> TextMetrics:
    divergence = None if kl is None else Divergence(of, kl, kl, kl, 0.9, Histogram((), (1,)), ())
    return TextMetrics(tokens, 4, 512, "float32", 2044, nll, divergence)


def test_text_can_fail_but_never_pass() -> None:
    base = replace(report(choices(100, "a"), 60), text=text(2.0))
    same = report(choices(100, "b"), 60, "other")
    strict = replace(POLICY, task_margin=50.0, margin=50.0)
    assert gate(base, same, strict).verdict == "pass"
    assert gate(base, replace(same, text=text(2.09, 0.1)), strict).verdict == "pass"
    far = gate(base, replace(same, text=text(2.1, 0.11)), strict)
    assert (far.verdict, far.exit_code) == ("fail", 3)
    assert far.reasons == (
        "mean KL is 0.1100 nats, 0.1 are allowed",
        "perplexity is 8.166, 1.105 times the baseline's 7.389; 1.1 times are allowed",
    )
    alone = gate(replace(base, tasks=None), replace(same, text=text(2.0, 0.0), tasks=None), strict)
    assert alone.verdict == "inconclusive"
    lost = gate(replace(base, tasks=None), replace(same, text=text(3.0), tasks=None), strict)
    assert lost.verdict == "fail"
    for wrong in (text(2.0, 0.0, of="another"), text(2.0, tokens="other")):
        assert gate(base, replace(same, text=wrong), strict).verdict == "invalid"


def test_noise_of_the_baseline() -> None:
    base, candidate = report(choices(1000, "a"), 600), report(choices(1000, "b"), 595, "other")
    again = report(choices(1000, "c"), 603)
    verdict = gate(base, candidate, POLICY, again)
    (row,) = verdict.noise
    assert (row.lost, row.won, verdict.verdict) == (0, 3, gate(base, candidate, POLICY).verdict)
    assert verdict.to_json()["noise"][0]["won"] == 3
    for unsteady in (605, 593):  # 5 of 5 in one direction are likely 1 in 16, 7 of 7 1 in 64
        found = gate(base, candidate, POLICY, report(choices(1000, "c"), unsteady))
        assert (found.verdict == "invalid") == (unsteady == 593)
    foreign = gate(base, candidate, POLICY, candidate)
    assert foreign.reasons == ("the repetition is of another checkpoint than the baseline",)


def evaluated(model: Path, tasks: Path, limit: int = 24) -> EvalReport:
    results = run_tasks(model, tasks, ["glm_arc_like", "glm_recall"], limit=limit, batch_size=24)
    return EvalReport(str(model), checkpoint_fingerprint(open_checkpoint(model)), tasks=results)


def swap_tokens(model: Path, tasks: Path) -> None:
    """Two tokens change their numbers, as in a tokenizer of another release."""
    path = model / "tokenizer.json"
    record = json.loads(path.read_text())
    vocabulary = record["model"]["vocab"]
    one, other = (name for name, number in vocabulary.items() if number in (300, 301))
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(record))


def edit(name: str, old: str, new: str) -> Callable[[Path, Path], None]:
    def change(model: Path, tasks: Path) -> None:
        path = tasks / name
        changed = path.read_text().replace(old, new)
        assert changed != path.read_text()
        path.write_text(changed)

    return change


@pytest.fixture(scope="module")
def baseline() -> EvalReport:
    return evaluated(MODEL, DEMO / "tasks")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (swap_tokens, "the same questions become other tokens: the tokenizers differ"),
        (edit("glm_recall.yaml", "max_gen_toks: 16", "max_gen_toks: 2"), '"max_gen_toks": 2'),
        (
            edit("glm_recall.yaml", "version: 1.0", "version: 1.1"),
            "version 1.0 in the baseline, 1.1",
        ),
    ],
    ids=["tokenizer", "cap", "version"],
)
def test_real_evaluations_that_differ(
    change: Callable[[Path, Path], None], reason: str, baseline: EvalReport, tmp_path: Path
) -> None:
    model, tasks = tmp_path / "model", tmp_path / "tasks"
    shutil.copytree(MODEL, model)
    shutil.copytree(DEMO / "tasks", tasks)
    change(model, tasks)
    verdict = gate(baseline, evaluated(model, tasks), POLICY)
    assert (verdict.verdict, verdict.exit_code) == ("invalid", 5)
    assert any(reason in found for found in verdict.reasons), verdict.reasons


def test_a_limit_and_a_cache_that_two_models_share(baseline: EvalReport) -> None:
    verdict = gate(baseline, evaluated(MODEL, DEMO / "tasks", limit=23), POLICY)
    assert verdict.verdict == "invalid"
    assert "limit differs: 24 in the baseline, 23 in the candidate" in verdict.reasons
    cached = replace(baseline, fingerprint="0" * 64)
    assert gate(baseline, cached, POLICY).reasons == (
        "every answer is the same, though the checkpoints differ: the same model was asked twice, "
        "or answers came from a cache",
    )
    itself = gate(baseline, evaluated(MODEL, DEMO / "tasks"), load_policy("article"))
    assert (itself.verdict, [(row.lost, row.won) for row in itself.rows]) == ("pass", [(0, 0)] * 3)
    assert "identical" in itself.remarks[0]


def with_cache(kv_cache: str | None, right: int = 30, model: str = "a") -> EvalReport:
    return replace(report(choices(40, model), right), kv_cache=kv_cache)


@pytest.mark.parametrize("ours", [None, "bf16", "fp8", "fp8-raw"])
@pytest.mark.parametrize("theirs", [None, "bf16", "fp8", "fp8-raw"])
def test_a_baseline_may_lose_nothing_by_its_cache(ours: str | None, theirs: str | None) -> None:
    """A candidate may: that is what it is judged for."""
    found = [*defects(with_cache(ours), with_cache(theirs, model="b"), POLICY)]
    if ours in (None, "bf16") or ours == theirs:
        assert found == []
        verdict = gate(with_cache(ours), with_cache(theirs, model="b"), POLICY)
        assert verdict.to_json()["kv_cache"] == {"baseline": ours, "candidate": theirs}
        assert any("KV cache" in remark for remark in verdict.remarks) == (ours != theirs)
    else:
        told = theirs or "as computed"
        (reason,) = found
        assert reason.startswith(f"the KV cache is {ours} in the baseline, {told} in the candidate")


def test_an_fp8_cache_that_changes_no_answer_was_none() -> None:
    (reason,) = defects(with_cache("bf16"), with_cache("fp8"), POLICY)
    assert reason.startswith("every answer is the same, though the KV caches differ")
    # In BF16 a BF16 cache is what is computed.
    assert [*defects(with_cache(None), with_cache("bf16"), POLICY)] == []
