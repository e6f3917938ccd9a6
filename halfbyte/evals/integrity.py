"""Whether two evaluations can be compared, and measure anything: before any statistics.

The same questions, asked in the same way, must have got answers of two models. What a damaged
checkpoint does by itself (text without end, answers nobody can read) is for the gate to fail; here
the baseline must be free of it, since then the evaluation is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from halfbyte.evals.policy import Policy
from halfbyte.evals.report import Answer, EvalReport, TaskScores, TaskSettings

FLAT = 1e-6
"""Nats by which the choices of an item differ at least, if they were scored at all."""
MOST_FLAT = 0.01
"""Share of items without that, at most."""
IDENTICAL_CHOICES = 20
"""Items whose log-probabilities are all the same bits: two models do not agree by that much."""
IDENTICAL_TEXTS = 200
FP8_CACHES = ("fp8", "fp8-raw")
IDENTICAL_TOKENS = 2000
"""The same for generated text, which is easily the same when it is short."""
ABOVE_CHANCE = 1.645
"""Standard errors by which a baseline must be better than guessing: one-sided 95 %."""


def tasks_by_name(report: EvalReport) -> dict[str, TaskScores]:
    return {task.name: task for task in report.tasks.tasks} if report.tasks else {}


def defects(baseline: EvalReport, candidate: EvalReport, policy: Policy) -> Iterator[str]:
    """Every reason why a comparison would tell nothing."""
    yield from _texts_differ(baseline, candidate)
    yield from differences(baseline, candidate)
    ours, theirs = tasks_by_name(baseline), tasks_by_name(candidate)
    for name in sorted(ours.keys() & theirs.keys()):
        yield from _unusable(ours[name], theirs[name], policy)
    weights = baseline.fingerprint != candidate.fingerprint
    cache = candidate.kv_cache in FP8_CACHES and candidate.kv_cache != baseline.kv_cache
    twice = (weights or cache) and _identical(ours, theirs)
    if twice and _many([answer for task in ours.values() for answer in task.answers]):
        what = "checkpoints" if weights else "KV caches"
        yield (
            f"every answer is the same, though the {what} differ: the same model was asked "
            "twice, or answers came from a cache"
        )


def differences(baseline: EvalReport, candidate: EvalReport) -> Iterator[str]:
    """Every reason why the tasks of two evaluations were not the same, done in the same way.

    A candidate may have an FP8 cache where the baseline has none: then it is judged by it, too.
    """
    if baseline.kv_cache in FP8_CACHES and candidate.kv_cache != baseline.kv_cache:
        yield (
            f"the KV cache is {baseline.kv_cache} in the baseline, {_cache(candidate)} in the "
            "candidate: what the baseline loses by it would hide what the candidate loses"
        )
    if baseline.tasks is None or candidate.tasks is None:
        sides = {"baseline": baseline, "candidate": candidate}
        without = [side for side, report in sides.items() if report.tasks is None]
        if len(without) == 1 or baseline.text is None or candidate.text is None:
            yield f"no task scores in the {' and the '.join(without)}"
        return
    yield from _settings_differ(baseline.tasks.settings, candidate.tasks.settings)
    ours, theirs = tasks_by_name(baseline), tasks_by_name(candidate)
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield f"task {name} is only in the {'baseline' if name in ours else 'candidate'}"
    for name in sorted(ours.keys() & theirs.keys()):
        yield from _task_differs(ours[name], theirs[name])


def remarkable(baseline: EvalReport, candidate: EvalReport) -> Iterator[str]:
    """What to know of two evaluations without defects."""
    ours, theirs = tasks_by_name(baseline), tasks_by_name(candidate)
    if baseline.kv_cache != candidate.kv_cache:
        yield (
            f"the KV cache is {_cache(candidate)} in the candidate, {_cache(baseline)} in the "
            "baseline, so it is judged with the weights"
        )
    if baseline.fingerprint == candidate.fingerprint:
        same = ours and _identical(ours, theirs)
        yield "both evaluations are of the same checkpoint" + (
            ", and identical: every answer is the same" if same else ""
        )
    for name, task in theirs.items():
        for what, now, before in (
            ("could not be read", _unread(task), _unread(ours[name])),
            ("reached the limit of tokens", _capped(task), _capped(ours[name])),
        ):
            if now > max(1, 2 * before):
                count = len(task.items)
                yield f"task {name}: {now} of {count:,} answers {what}, {before} of the baseline's"


def _cache(report: EvalReport) -> str:
    return report.kv_cache or "as computed"


def _texts_differ(baseline: EvalReport, candidate: EvalReport) -> Iterator[str]:
    ours, theirs = baseline.text, candidate.text
    if theirs is None:
        return
    if ours is not None and ours.tokens_sha256 != theirs.tokens_sha256:
        yield "the held-out text differs: other text, windows or tokenizer"
    if theirs.divergence is not None and theirs.divergence.baseline != baseline.fingerprint:
        yield "the candidate's KL was measured against another checkpoint than the baseline"


def _settings_differ(baseline: TaskSettings, candidate: TaskSettings) -> Iterator[str]:
    for field in fields(baseline):
        ours, theirs = getattr(baseline, field.name), getattr(candidate, field.name)
        if ours != theirs:
            yield f"{field.name} differs: {ours} in the baseline, {theirs} in the candidate"


def _task_differs(ours: TaskScores, theirs: TaskScores) -> Iterator[str]:
    task = f"task {ours.name}"
    if ours.version != theirs.version:
        yield f"{task}: version {ours.version} in the baseline, {theirs.version} in the candidate"
    metrics = [[(m.name, m.higher_is_better) for m in side.metrics] for side in (ours, theirs)]
    if metrics[0] != metrics[1]:
        names = [", ".join(name for name, _ in side) for side in metrics]
        yield f"{task}: metrics {names[0]} in the baseline, {names[1]} in the candidate"
    if ours.generation != theirs.generation:
        both = " and ".join(ours.generation), " and ".join(theirs.generation)
        yield f"{task}: text generated by {both[0]} in the baseline, {both[1]} in the candidate"
    counts = len(ours.items), len(theirs.items)
    if counts[0] != counts[1]:
        yield f"{task}: {counts[0]} items in the baseline, {counts[1]} in the candidate"
        return
    different = [pair for pair in zip(ours.items, theirs.items, strict=True) if pair[0] != pair[1]]
    if different:
        first, other = different[0]
        parts = [name for name in first._fields if getattr(first, name) != getattr(other, name)]
        yield (
            f"{task}: {len(different)} of {counts[0]} items are not the same question, "
            f"the first is item {first.number} of {first.task} (differs in {', '.join(parts)})"
        )
    elif ours.items_sha256 != theirs.items_sha256:
        yield f"{task}: the hash over all items differs"
    elif ours.tokens_sha256 != theirs.tokens_sha256:
        yield f"{task}: the same questions become other tokens: the tokenizers differ"


def _unusable(ours: TaskScores, theirs: TaskScores, policy: Policy) -> Iterator[str]:
    """What shows that the evaluation of a task did not work."""
    task, count = f"task {ours.name}", len(ours.items)
    for what, found, most in (
        ("could not be read", _unread(ours), policy.max_unread),
        ("reached the limit of tokens", _capped(ours), policy.max_capped),
    ):
        # A single one is no share of anything.
        if found > max(1.0, most / 100 * count):
            yield f"{task}: {found} of the baseline's {count:,} answers {what}, {most:g} % may"
    for side, scores in (("baseline", ours), ("candidate", theirs)):
        flat = sum(answer.choices > 1 and answer.spread < FLAT for answer in scores.answers)
        if flat > MOST_FLAT * len(scores.items):
            yield (
                f"{task}: all choices of {flat} of {len(scores.items):,} items are equally likely "
                f"in the {side}: no log-probabilities were measured"
            )
    yield from _tells_nothing(ours, policy)


def _tells_nothing(ours: TaskScores, policy: Policy) -> Iterator[str]:
    """Whether a baseline has nothing to lose: it answers nothing right, or choices by guessing."""
    deciding = policy.deciding(ours.name, [metric.name for metric in ours.metrics])
    metric = next((m for m in ours.metrics if m.name == deciding), ours.metrics[0])
    if not {*metric.values} <= {0.0, 1.0}:
        return
    if metric.higher_is_better and not any(metric.values):
        yield (
            f"task {ours.name}: the baseline answers none of {metric.count:,} items right by "
            f"{metric.name}; the task tells nothing"
        )
        return
    choices = [answer.choices for answer in ours.answers]
    if min(choices) < 2:
        return
    chances = [1 / n for n in choices]
    expected = sum(chances)
    deviation = math.sqrt(sum(p * (1 - p) for p in chances))
    if metric.total <= expected + ABOVE_CHANCE * deviation:
        count = len(choices)
        yield (
            f"task {ours.name}: the baseline is at chance, {metric.name} "
            f"{100 * metric.total / count:.1f} % of {count:,} items where guessing gives "
            f"{100 * expected / count:.1f} %; the task tells nothing"
        )


def _identical(ours: dict[str, TaskScores], theirs: dict[str, TaskScores]) -> bool:
    """Whether all answers to the tasks that both have are the same."""
    return all(
        a.sha256 == b.sha256
        for name in ours.keys() & theirs.keys()
        for a, b in zip(ours[name].answers, theirs[name].answers, strict=False)
    )


def _many(answers: Sequence[Answer]) -> bool:
    """Whether two models would not give all of these alike by chance."""
    choices = sum(answer.choices > 1 for answer in answers)
    texts = [answer.tokens for answer in answers if not answer.choices]
    return choices >= IDENTICAL_CHOICES or (
        len(texts) >= IDENTICAL_TEXTS and sum(texts) >= IDENTICAL_TOKENS
    )


def _unread(task: TaskScores) -> int:
    """Answers that no filter could read."""
    filters = {metric.filter for metric in task.metrics}
    return sum(filters <= {*answer.unread} for answer in task.answers)


def _capped(task: TaskScores) -> int:
    return sum(answer.capped for answer in task.answers)
