"""Scores by a server against those in this process, and servers that must be refused."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.errors import EvaluationError, UsageError
from halfbyte.evals import client
from halfbyte.evals.client import server_root
from halfbyte.evals.endpoint import PROBE, Endpoint
from halfbyte.evals.evaluation import Evaluation
from halfbyte.evals.gate import gate
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import EvalReport, TaskResults
from halfbyte.evals.wires import OpenAI, SGLang

DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo"
MODEL = DEMO / "glm-nano-fp8"
TASKS = ["glm_gsm_like", "glm_tool_call", "glm_mmlu_like", "glm_arc_like"]
APIS = ("openai", "sglang")


@pytest.fixture(scope="module")
def in_process() -> TaskResults:
    return run_tasks(MODEL, DEMO / "tasks", TASKS, limit=2, batch_size=8)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were to be waited."""
    waits: list[float] = []
    monkeypatch.setattr(client.time, "sleep", waits.append)
    return waits


def ask(server: Any, *tasks: str, limit: int = 1, **options: Any) -> TaskResults:
    fields = {name: options.pop(name) for name in ("api", "model") if name in options}
    engine = Endpoint(options.pop("url", server.url), **fields)
    return run_tasks(MODEL, DEMO / "tasks", tasks, engine=engine, limit=limit, **options)


@pytest.mark.parametrize("api", APIS)
def test_every_item_scores_as_in_this_process(
    server: Any, in_process: TaskResults, api: str
) -> None:
    server.apis = (api,)
    found = ask(server, *TASKS, limit=2, batch_size=4)
    assert [(task.name, task.version, task.items_sha256) for task in found.tasks] == [
        (task.name, task.version, task.items_sha256) for task in in_process.tasks
    ]
    for ours, theirs in zip(found.tasks, in_process.tasks, strict=True):
        assert (ours.items, ours.metrics) == (theirs.items, theirs.metrics)
        assert ours.tokens_sha256 == theirs.tokens_sha256
        for answer, other in zip(ours.answers, theirs.answers, strict=True):
            if other.choices:  # which are computed in batches here and one by one there
                assert answer.choices == other.choices
                assert answer.spread == pytest.approx(other.spread, abs=1e-3)
            else:
                assert answer == other
    assert 0 < sum(task.metrics[0].mean for task in found.tasks) < len(TASKS)
    assert server.most_at_once == 4
    settings = found.settings
    assert settings.backend == f"{api} endpoint"
    assert settings.versions == {
        **{name: in_process.settings.versions[name] for name in ("lm_eval", "transformers")},
        **({"vllm": "0.25.1"} if api == "openai" else {"sglang": "0.5.9"}),
    }
    assert settings.flags == ({} if api == "openai" else {"tp_size": "2"})
    assert (settings.batch_size, settings.max_length, settings.limit) == (4, 1024, 2)
    # One by a server and one in this process cannot be judged against each other.
    reports = [EvalReport("", "0" * 64, tasks=results) for results in (in_process, found)]
    verdict = gate(*reports, load_policy("default"))
    assert verdict.verdict == "invalid"
    reason = f"backend differs: hf in the baseline, {api} endpoint in the candidate"
    assert reason in verdict.reasons


@pytest.mark.parametrize("api", APIS)
def test_requests_and_replies_are_those_of_lm_eval(server: Any, api: str) -> None:
    """Our client is for servers that lm-eval's own models can be used with."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.models.sglang_generate_API import SGLANGGENERATEAPI

    server.apis = (api,)
    theirs = {"openai": LocalCompletionsAPI, "sglang": SGLANGGENERATEAPI}[api]
    wire = OpenAI("nano") if api == "openai" else SGLang()
    settings = SimpleNamespace(model="nano", _max_gen_toks=256)
    ids = server.nano.tokenizer.encode(PROBE)
    assert wire.score(ids) == theirs._create_payload(settings, [ids], seed=1234)
    arguments = {"until": ["\n"], "temperature": 0.0, "max_gen_toks": 7, "top_p": 0.5}
    expected = theirs._create_payload(
        settings, [ids], generate=True, gen_kwargs=dict(arguments), seed=1234, eos="</s>"
    )
    more = {"temperature": 0.0, "top_p": 0.5}
    assert wire.generate(ids, 7, {"stop": ["\n", "</s>"]}, more) == expected

    reply = server.answer(wire.path, wire.score(ids))
    scored = wire.read_scored(reply, ids)
    ((log_likelihood, _),) = theirs.parse_logprobs(reply, [ids], [5])
    assert sum(scored.log_probs[4:]) == pytest.approx(log_likelihood, abs=1e-9)
    table = server.nano.log_probs(ids)
    assert scored.log_probs == [float(table[i, token]) for i, token in enumerate(ids[1:])]
    assert scored.greedy == [int(table[i].argmax()) == token for i, token in enumerate(ids[1:])]
    assert True in scored.greedy
    assert False in scored.greedy


def spoil_completions(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of the log-probabilities of each reply that has some."""

    def spoil(reply: Any) -> Any:
        for choice in reply.get("choices", ()):
            if "logprobs" in choice:
                choice["logprobs"] = change(choice["logprobs"])
        return reply

    return spoil


def equal(logprobs: Any) -> Any:
    values = [None] + [-1.5 for _ in logprobs["token_logprobs"][1:]]
    return {**logprobs, "token_logprobs": values}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: None, "no usable log-probabilities of a prompt"),
        (equal, "gives each of 43 tokens the log-probability -1.5"),
        (lambda logprobs: {**logprobs, "top_logprobs": None}, "no usable log-probabilities"),
        (
            lambda logprobs: {name: values[-1:] for name, values in logprobs.items()},
            "of 1 tokens for a prompt of 44",
        ),
        (
            lambda logprobs: {**logprobs, "token_logprobs": [float("nan")] * 45},
            "a log-probability is not finite",
        ),
        (
            lambda logprobs: {**logprobs, "token_logprobs": [None] * 45},
            "no usable log-probabilities",
        ),
    ],
)
def test_server_without_log_probabilities(
    server: Any, change: Callable[[Any], Any], says: str
) -> None:
    server.spoil = spoil_completions(change)
    with pytest.raises(EvaluationError, match=says) as caught:
        ask(server, "glm_arc_like")
    assert "the choices of glm_arc_like are compared by them" in str(caught.value)
    assert "only tasks that generate" in str(caught.value.hint)
    # A task that generates asks for none.
    assert ask(server, "glm_recall").tasks[0].metrics[0].values == (1.0,)


def test_sglang_server_without_log_probabilities(server: Any) -> None:
    def spoil(reply: Any) -> Any:
        for part in reply if isinstance(reply, list) else [reply]:
            part["meta_info"] = {"prompt_tokens": part["meta_info"]["prompt_tokens"]}
        return reply

    server.apis, server.spoil = ("sglang",), spoil
    with pytest.raises(EvaluationError, match="'input_token_logprobs' is missing"):
        ask(server, "glm_arc_like")
    assert ask(server, "glm_recall").tasks[0].metrics[0].values == (1.0,)


def test_which_model(server: Any) -> None:
    server.models = ("nano", "other")
    with pytest.raises(EvaluationError, match="serves nano, other") as caught:
        ask(server, "glm_recall")
    assert caught.value.hint == "choose one: --model nano"
    with pytest.raises(EvaluationError, match="does not serve small; it serves nano, other"):
        ask(server, "glm_recall", model="small")
    assert ask(server, "glm_recall", model="other").tasks[0].metrics[0].values == (1.0,)
    server.apis = ("openai", "sglang")
    with pytest.raises(UsageError, match="--model: SGLang's /generate has one model"):
        ask(server, "glm_recall", model="nano")
    assert ask(server, "glm_recall").settings.backend == "sglang endpoint"
    found = ask(server, "glm_recall", api="openai", model="nano")
    assert found.settings.backend == "openai endpoint"


def test_key(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.key = "secret"
    with pytest.raises(EvaluationError, match="answered 401: it asks for a key") as caught:
        ask(server, "glm_recall")
    assert "OPENAI_API_KEY" in str(caught.value.hint)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert ask(server, "glm_recall").tasks[0].metrics[0].values == (1.0,)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("tells", [True, False])
def test_another_tokenizer(server: Any, api: str, tells: bool) -> None:
    server.apis, server.tells_tokens = (api,), tells
    server.split = lambda ids: [*ids[:-1], ids[-1] ^ 1]
    if tells or api == "sglang":
        with pytest.raises(EvaluationError, match=r"as other tokens, the tokenizer of .* as 44"):
            ask(server, "glm_recall")
    server.split = lambda ids: [*ids, 7]
    if tells or api == "sglang":
        with pytest.raises(EvaluationError, match=r"as 45 tokens, the tokenizer of .* as 44") as c:
            ask(server, "glm_recall")
        assert "the checkpoint that the server serves" in str(c.value.hint)
    else:  # it tells nothing, and nothing can be said
        assert ask(server, "glm_recall").tasks[0].metrics[0].values == (1.0,)


@pytest.mark.parametrize("api", APIS)
def test_context_of_the_server(server: Any, api: str) -> None:
    server.apis, server.limit = (api,), 300
    with pytest.raises(EvaluationError, match="of 300 tokens, --max-length is 512") as caught:
        ask(server, "glm_arc_like", max_length=512)
    assert "--max-length 300" in str(caught.value.hint)
    assert ask(server, "glm_arc_like").settings.max_length == 300
    server.limit = 16
    with pytest.raises(EvaluationError, match=r"needs \d+ tokens with its answer, .* length is 16"):
        ask(server, "glm_arc_like")
    # One that cuts without a word.
    server.limit, server.cuts_at = None, 50
    with pytest.raises(EvaluationError, match="has read 50 tokens of a prompt of"):
        ask(server, "glm_recall")
    server.cuts_at = 30
    with pytest.raises(EvaluationError, match=r"of 3[01] tokens for a prompt of 44"):
        ask(server, "glm_arc_like")


def test_busy_server(server: Any, no_waiting: list[float]) -> None:
    server.refusals, server.retry_after = [500, 429, 503, 502], "7"
    assert ask(server, "glm_recall", batch_size=1).tasks[0].metrics[0].values == (1.0,)
    assert no_waiting[:3] == [7, 7, 7]
    assert 7 <= no_waiting[3] <= 10  # 8 seconds, give or take a quarter
    server.refusals, server.retry_after = [429] * 50, "100000"
    with pytest.raises(EvaluationError, match="429 in each of 5 tries: too busy") as caught:
        ask(server, "glm_recall", batch_size=1)
    assert "--batch-size" in str(caught.value.hint)
    assert (len(server.refusals), len(no_waiting), no_waiting[-1]) == (45, 8, 60)


def test_refusals(server: Any) -> None:
    server.refusals = [400]
    with pytest.raises(EvaluationError, match=r"/v1/completions answered 400: too busy"):
        ask(server, "glm_recall")
    with pytest.raises(EvaluationError, match=r"/generate answered 404: \{\"detail\": \"Not"):
        ask(server, "glm_recall", api="sglang")
    server.spoil = lambda reply: b"<html>"
    with pytest.raises(EvaluationError, match="answered what is no JSON"):
        ask(server, "glm_recall")
    server.spoil = lambda reply: {**reply, "choices": []}
    with pytest.raises(EvaluationError, match="a reply without an answer"):
        ask(server, "glm_recall")
    server.spoil = lambda reply: b" " * 2_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "LARGEST_REPLY", 1 << 20)
        with pytest.raises(EvaluationError, match="a reply of more than 1 MiB"):
            ask(server, "glm_recall")
    server.redirect = "http://elsewhere"
    with pytest.raises(EvaluationError, match="307: it redirects to http://elsewhere"):
        ask(server, "glm_recall")
    server.apis = ()
    with pytest.raises(EvaluationError, match="neither an OpenAI-compatible server"):
        ask(server, "glm_recall")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EvaluationError, match=r"no server answers: .*refused"):
        ask(server, "glm_recall", url=url)


def test_what_else_is_served_is_another_evaluation(server: Any) -> None:
    """As a store sees it, which would give the scores of the server before."""

    def identity() -> Any:
        return Evaluation(MODEL, tasks=DEMO / "tasks", engine=Endpoint(server.url)).identity()

    first = identity()
    assert identity() == first
    assert (first["engine model"], first["engine vllm"]) == ("nano", "0.25.1")
    server.models = ("other",)
    assert identity() != first
    server.models, server.limit = ("nano",), 512
    assert identity() != first
    server.apis = ("sglang",)
    assert identity()["engine tp_size"] == "2"
    assert "secret" not in str(identity())


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://host:30000", "http://host:30000"),
        ("http://host:30000/generate", "http://host:30000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/team/v1/completions", "https://host/team"),
    ],
)
def test_address(url: str, root: str) -> None:
    assert server_root(url) == root


@pytest.mark.parametrize(
    "url",
    [
        "host:8000",
        "ftp://host",
        "http://",
        "http://h/?a=b",
        "http://h:x",
        "http://h:99999",
        "http://[::",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="is no address of a server"):
        server_root(url)


def test_passwords_stay_out_of_reports() -> None:
    with pytest.raises(UsageError, match="no password in an address") as caught:
        server_root("http://me:secret@host")
    assert "secret" not in str(caught.value)
