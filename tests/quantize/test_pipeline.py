"""Whole runs on small checkpoints: what comes out, what survives a kill, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from halfbyte.calibration import runner as runner_module
from halfbyte.core import Placement, Plan, RunReport, Settings, Streams
from halfbyte.errors import CalibrationError, CheckpointError, ResumeError
from halfbyte.evals.model import load_model
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.journal import Journal
from halfbyte.formats.layout import file_layout
from halfbyte.formats.readahead import ByteRange
from halfbyte.formats.shards import ShardReader, _FolderShards, byte_range
from halfbyte.formats.weights import logical_weights
from halfbyte.formats.writebehind import Target
from halfbyte.formats.writer import SavedState
from halfbyte.quantize import calibrated, pipeline
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.quantize.verify import verify
from halfbyte.testing.tiny import write_nested, write_tiny

SETTINGS = Settings(samples=6, sequence_length=24)
RTN = replace(SETTINGS, method="rtn")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens(samples: int = 6, length: int = 24) -> torch.Tensor:
    return torch.randint(10, 300, (samples, length), generator=torch.Generator().manual_seed(5))


def plan_of(source: Path, settings: Settings = SETTINGS, recipe: str = "glm-5", **kw: Any) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(recipe), settings, **kw)


def quantize(source: Path, out: Path, settings: Settings = SETTINGS, **kw: Any) -> RunReport:
    plan_options = {k: kw.pop(k) for k in ("recipe", "max_shard_bytes") if k in kw}
    given = kw.pop("tokens", tokens())
    calibrated_tokens = None if settings.method == "rtn" else given
    return pipeline.run(
        plan_of(source, settings, **plan_options), out, tokens=calibrated_tokens, **kw
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("settings", [SETTINGS, RTN], ids=["gptq", "rtn"])
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("recipe", ["glm-5", "experts-and-dense"])
def test_output_is_complete_and_verifies(
    tmp_path: Path, model_type: Any, settings: Settings, recipe: str
) -> None:
    source = write_tiny(tmp_path / "tiny", model_type=model_type)
    # Enough tokens for some to be held out, on which the errors are.
    settings = replace(settings, samples=60)
    report = quantize(source, tmp_path / "out", settings, recipe=recipe, tokens=tokens(60))
    assert verify(tmp_path / "out", source).mismatches == ()
    experts = [linear for linear in report.linears if ".experts." in linear.name]
    assert len(experts) == 4 * 4 * 3  # 3 sparse layers and the MTP layer, 4 experts, 3 linears
    assert (len(report.linears) > len(experts)) == (recipe == "experts-and-dense")
    if settings.method == "gptq":
        assert sum(r.error for r in report.linears) < 0.9 * sum(r.rtn_error for r in report.linears)
        assert {r.rung for r in report.linears} <= {"routed", "blended", "all-tokens"}
    else:
        assert all(r.error == r.rtn_error and r.rung == "weights-only" for r in report.linears)


def test_transformers_loads_the_output_as_we_decode_it(tmp_path: Path) -> None:
    """compressed-tensors' own decompression, through transformers' own loading."""
    source = write_tiny(tmp_path / "tiny")
    out = tmp_path / "out"
    quantize(source, out)
    model, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert all(key.startswith("model.layers.4.") for key in info["unexpected_keys"])
    state = model.state_dict()
    checkpoint = open_checkpoint(out)
    with ShardReader(checkpoint) as reader:
        for name, stored in logical_weights(checkpoint).items():
            if ".layers.4." in name:
                continue
            ours = reader.read_weight(stored)
            if ".experts." in name:
                expert, leaf = int(name.split(".")[5]), name.split(".")[6]
                prefix = name[: name.index("experts.")] + "experts."
                if leaf == "down_proj":
                    theirs = state[prefix + "down_proj"][expert]
                else:
                    theirs = state[prefix + "gate_up_proj"][expert].chunk(2)[leaf == "up_proj"]
            else:
                theirs = state[name]
            torch.testing.assert_close(ours.bfloat16().float(), theirs.bfloat16().float())
    # Both compute in float32 now, with the experts as compressed-tensors rounds them.
    whole = load_model(out)
    for loaded in (model, whole):
        for name, parameter in loaded.named_parameters():
            exact = parameter.data.bfloat16() if ".experts." in name else parameter.data
            parameter.data = exact.float()
    with torch.no_grad():
        logits = [loaded(tokens(), use_cache=False).logits for loaded in (whole, model)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_the_state_that_moves_on_is_that_of_the_quantized_layer(tmp_path: Path) -> None:
    """After the last layer the state is what the finished checkpoint computes from the tokens."""
    source = write_tiny(tmp_path / "tiny", mtp=False, source="bf16")
    seen: list[torch.Tensor] = []
    original = calibrated.LayerQuantizer.run

    def spy(self: Any, unit: Any, emit: Any) -> Any:
        reports = original(self, unit, emit)
        seen.append(self.state.hidden[:].clone())
        return reports

    calibrated.LayerQuantizer.run = spy  # type: ignore[method-assign]
    try:
        quantize(source, tmp_path / "out", recipe="experts-and-dense")
    finally:
        calibrated.LayerQuantizer.run = original  # type: ignore[method-assign]
    with ShardReader(open_checkpoint(tmp_path / "out")) as reader:
        from halfbyte.calibration.architecture import Architecture

        runner = runner_module.LayerRunner(
            Architecture.of(reader.checkpoint),
            logical_weights(reader.checkpoint),
            reader,
            device="cpu",
            dtype=torch.float32,
        )
        state = runner.embed(tokens())
        for index in range(4):
            runner.advance(index, state)
    torch.testing.assert_close(seen[-1], state.hidden[:], rtol=1e-4, atol=1e-4)


def test_same_input_same_bytes(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny")
    first, second = tmp_path / "first", tmp_path / "second"
    quantize(source, first)
    quantize(source, second)
    assert contents(first) == contents(second)


@pytest.mark.parametrize("at_once", [1, 3])
def test_how_many_experts_are_solved_at_once_changes_no_byte(tmp_path: Path, at_once: int) -> None:
    plan = plan_of(write_tiny(tmp_path / "tiny"))
    assert plan.memory.placement.experts_at_once == 4
    pipeline.run(plan, tmp_path / "together", tokens=tokens())
    memory = replace(plan.memory, placement=Placement(at_once))
    pipeline.run(replace(plan, memory=memory), tmp_path / "apart", tokens=tokens())
    assert contents(tmp_path / "apart") == contents(tmp_path / "together")


@pytest.mark.parametrize(
    ("recipe", "method"), [("glm-5", "gptq"), ("experts-and-dense", "awq+gptq")]
)
def test_where_hidden_states_lie_changes_no_byte(
    tmp_path: Path, recipe: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a run that goes on with them elsewhere. 24 tokens of which 16 are selected."""
    monkeypatch.setattr(runner_module, "BATCH_TOKENS", 48)
    monkeypatch.setattr(runner_module, "EXPERT_TOKENS", 96)
    settings = replace(SETTINGS, method=method, device=DEVICE)
    plan = plan_of(write_tiny(tmp_path / "tiny"), settings, recipe)
    assert replace(plan.memory.placement, streams=Streams()) == Placement(4)
    pipeline.run(plan, tmp_path / "memory", tokens=tokens())

    def placed(states: Any, inputs: Any) -> Plan:
        placement = Placement(4, states, inputs, experts_on_host=DEVICE == "cuda")
        return replace(plan, memory=replace(plan.memory, placement=placement))

    commit = pipeline.CheckpointWriter.commit
    commits = []

    def stopping(self: Any, *args: Any, **kw: Any) -> None:
        commits.append(commit(self, *args, **kw))
        if len(commits) == 3:
            raise Crash

    for number, places in enumerate([("disk", "device"), ("host", "disk"), ("disk", "disk")]):
        out = tmp_path / str(number)
        commits.clear()
        with monkeypatch.context() as patch:
            patch.setattr(pipeline.CheckpointWriter, "commit", stopping)
            with pytest.raises(Crash):
                pipeline.run(placed(*places), out, tokens=tokens())
        pipeline.run(placed(*places[::-1]), out, tokens=tokens(), resume=True)
        assert contents(out) == contents(tmp_path / "memory")


def test_all_of_a_layer_is_read_ahead_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with row feedback, which first reads what lies behind the last layer."""
    fill = _FolderShards.read
    reads: list[tuple[str, ByteRange]] = []

    def noting(self: _FolderShards, wanted: ByteRange, buffer: memoryview) -> None:
        reads.append((threading.current_thread().name, wanted))
        fill(self, wanted, buffer)

    monkeypatch.setattr(_FolderShards, "read", noting)
    plan = plan_of(write_tiny(tmp_path / "tiny", layers=8))
    assert plan.settings.feeds_back
    placement = replace(plan.memory.placement, streams=Streams(read_ahead=1 << 20))
    plan = replace(plan, memory=replace(plan.memory, placement=placement))
    pipeline.run(plan, tmp_path / "out", tokens=tokens())
    experts = [
        part
        for tensor in plan.tensors
        if ".experts." in tensor.name
        for part in tensor.source.parts.values()
    ]
    assert len(experts) > 50
    for part in experts:
        own = byte_range(part, None)
        readers = [
            name
            for name, read in reads
            if read.shard == own.shard and read.begin <= own.begin and own.end <= read.end
        ]
        assert len(readers) == 1
        assert readers[0].startswith("read-ahead")


class Crash(BaseException):
    pass


@pytest.mark.parametrize("settings", [SETTINGS, RTN], ids=["gptq", "rtn"])
def test_resume_after_every_unit_gives_the_same_bytes(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "tiny")  # 24 tokens of which 16 are selected: top-k is carried
    options: dict[str, Any] = {"max_shard_bytes": 200_000}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    quantize(source, whole, settings, **options)
    units = len(plan_of(source, settings).units)
    commit = pipeline.CheckpointWriter.commit

    def stop_after(count: int) -> Any:
        left = count

        def wrapped(self: Any, *args: Any, **kw: Any) -> None:
            nonlocal left
            if left == 0:
                raise Crash
            left -= 1
            commit(self, *args, **kw)

        return wrapped

    # Each attempt gets one unit further than the one before.
    for attempt in range(units):
        monkeypatch.setattr(pipeline.CheckpointWriter, "commit", stop_after(1))
        if attempt < units - 1:
            with pytest.raises(Crash):
                quantize(source, broken, settings, resume=True, **options)
            assert not (broken / "config.json").exists()
    monkeypatch.setattr(pipeline.CheckpointWriter, "commit", commit)
    quantize(source, broken, settings, resume=True, **options)
    assert contents(broken) == contents(whole)


@pytest.mark.parametrize("every", [2, 3])
def test_resume_after_layers_without_a_state_gives_the_same_bytes(
    tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts are cut off at any distance from the last stored state, also while they do again
    what an earlier one had done."""
    source = write_tiny(tmp_path / "tiny")
    options: dict[str, Any] = {"max_shard_bytes": 200_000}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    quantize(source, whole, **options)
    units = len(plan_of(source).units)
    commit = pipeline.CheckpointWriter.commit
    finished = []
    for count in (1, 1, 2, 1, 3, 1, units):
        layers = commits = 0

        def pays(last: Any, now: float) -> bool:
            nonlocal layers
            layers += 1
            return layers % every == 0

        def stopping(self: Any, *args: Any, count: int = count, **kw: Any) -> None:
            nonlocal commits
            if commits == count:
                raise Crash
            commits += 1
            commit(self, *args, **kw)

        monkeypatch.setattr(pipeline, "state_pays", pays)
        monkeypatch.setattr(pipeline.CheckpointWriter, "commit", stopping)
        try:
            quantize(source, broken, resume=True, **options)
            break
        except Crash:
            journal = Journal(broken / ".halfbyte" / "journal.jsonl")
            finished.append(len(journal.commits))
            state = journal.commits[-1].record["state"]
            assert state is not None or len(journal.commits) in (1, units - 1)
            assert not (broken / "config.json").exists()
    assert finished == sorted(finished)
    assert len(finished) - len(set(finished)) >= 2  # attempts that only did units again
    assert contents(broken) == contents(whole)


def test_a_state_is_stored_when_ten_times_its_writing_has_passed() -> None:
    state = SavedState(Target(Path("state"), file_layout("state", ())), begun=100.0)
    assert pipeline.state_pays(None, 5.0)
    assert not pipeline.state_pays(state, 900.0)  # not even written
    state.seconds = 13.0
    assert not pipeline.state_pays(state, 229.0)
    assert pipeline.state_pays(state, 230.0)
    state.seconds = 0.05
    assert pipeline.state_pays(state, 100.1)


def test_kill_dash_nine_and_resume(tmp_path: Path) -> None:
    """A real process, killed at several moments by the operating system."""
    source = write_tiny(tmp_path / "tiny", layers=6)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {n} of {n * n}"}) + "\n" for n in range(99)))
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def command(out: Path, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "halfbyte", "run", str(source), "--to", "int4", "-o", str(out)),
            *("--calibration", str(text), "--samples", "6", "--sequence-length", "24", "-q"),
            *("--device", "cpu", *more),
        ]

    subprocess.run(command(whole), check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    journal = broken / ".halfbyte" / "journal.jsonl"
    for lines in (1, 3, 5, 7):
        process = subprocess.Popen(
            command(broken, "--resume"), env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        while process.poll() is None:
            if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
                process.send_signal(signal.SIGKILL)
                process.wait()
            time.sleep(0.005)
        assert process.returncode == -signal.SIGKILL
        assert not (broken / "config.json").exists()
    subprocess.run(
        command(broken, "--resume"), check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    # What a run took differs, and so does the card of a folder of another name.
    about = {"README.md", "halfbyte_run.json"}
    files = [{n: f for n, f in contents(o).items() if n not in about} for o in (broken, whole)]
    assert files[0] == files[1]
    units = json.loads((broken / "halfbyte_run.json").read_text())["units"]
    assert [unit["unit"] for unit in units[:2]] == ["embedding", "layers.0"]
    assert all(unit["host"] > 0 for unit in units)


def test_resuming_a_finished_run_says_so(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny")
    first = quantize(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    again = quantize(source, tmp_path / "out", resume=True)
    assert again.already_finished
    assert not first.already_finished
    assert again.to_json() == first.to_json()
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 7}, "settings.seed was 0, now 7"),
        ({"samples": 5}, "settings.samples was 6, now 5"),
        ({"dampening": 0.1}, "settings.dampening was 0.01, now 0.1"),
        ({"method": "rtn"}, "settings.method was gptq, now rtn"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_resume_refuses_other_settings(
    tmp_path: Path,
    change: dict[str, Any],
    difference: str,
    finished: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out = write_tiny(tmp_path / "tiny"), tmp_path / "out"
    interrupt(source, out, monkeypatch, finished=finished)
    settings = replace(SETTINGS, **change)
    with pytest.raises(ResumeError, match=difference):
        quantize(source, out, settings, resume=True, tokens=tokens(settings.samples))


@pytest.mark.parametrize("finished", [True, False])
def test_resume_refuses_another_recipe_source_and_version(
    tmp_path: Path, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_tiny(tmp_path / "tiny"), tmp_path / "out"
    interrupt(source, out, monkeypatch, finished=finished)
    with pytest.raises(ResumeError, match=r"recipe\..* was .*, now"):
        quantize(source, out, resume=True, recipe="experts-and-dense")
    other = write_tiny(tmp_path / "other", experts=8)
    with pytest.raises(ResumeError, match="source"):
        quantize(other, out, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "package_versions", lambda _: {"torch": "0.1"})
        with pytest.raises(ResumeError, match=r"versions\.\w+ was "):
            quantize(source, out, resume=True)
    if not finished:
        shard = next(source.glob("*.safetensors"))
        os.utime(shard, ns=(0, 0))
        with pytest.raises(ResumeError, match=shard.name):
            quantize(source, out, resume=True)


def test_resume_refuses_another_text(tmp_path: Path) -> None:
    source, out = write_tiny(tmp_path / "tiny"), tmp_path / "out"
    quantize(source, out)
    with pytest.raises(ResumeError, match=r"settings\.calibration_sha256 was \w{64}, now \w{64}"):
        quantize(source, out, resume=True, tokens=tokens() + 1)
    with pytest.raises(ValueError, match=r"shape \(6, 24\), given are \(6, 9\)"):
        quantize(source, out, resume=True, tokens=tokens(6, 9))


def test_resume_refuses_a_damaged_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_tiny(tmp_path / "tiny"), tmp_path / "out"
    interrupt(source, out, monkeypatch)
    state = out / ".halfbyte" / "state-1.safetensors"
    data = bytearray(state.read_bytes())
    data[-3] ^= 1
    state.write_bytes(data)
    with pytest.raises(ResumeError, match=rf"{state.name} is missing or damaged"):
        quantize(source, out, resume=True)


def test_resume_refuses_another_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_tiny(tmp_path / "tiny"), tmp_path / "out"
    interrupt(source, out, monkeypatch)
    (source / "chat_template.jinja").write_text("another")
    with pytest.raises(ResumeError, match=r"source\.files\.chat_template\.jinja was "):
        quantize(source, out, resume=True)


def test_a_finished_run_that_lost_bytes_is_not_reported_as_finished(tmp_path: Path) -> None:
    source, out = write_tiny(tmp_path / "tiny"), tmp_path / "out"
    quantize(source, out)
    report = out / "halfbyte_report.json"
    whole = report.read_bytes()
    report.write_text('{"')
    with pytest.raises(ResumeError, match="is damaged"):
        quantize(source, out, resume=True)
    report.write_bytes(whole)
    shard = next(out.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ResumeError, match=shard.name):
        quantize(source, out, resume=True)


def test_a_source_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_tiny(tmp_path / "tiny"), tmp_path / "out"
    commit = pipeline.CheckpointWriter.commit

    def touching(self: Any, *args: Any, **kw: Any) -> None:
        os.utime(next(source.glob("*.safetensors")), ns=(0, 0))
        commit(self, *args, **kw)

    monkeypatch.setattr(pipeline.CheckpointWriter, "commit", touching)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        quantize(source, out)
    assert not (out / "config.json").exists()


def test_an_mtp_layer_that_the_config_forgets(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny")
    config = json.loads((source / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (source / "config.json").write_text(json.dumps(config))
    report = quantize(source, tmp_path / "out")
    assert sum(".layers.4." in linear.name for linear in report.linears) == 12


def test_config_and_tensors_that_disagree_are_found_before_anything_is_written(
    tmp_path: Path,
) -> None:
    source = write_tiny(tmp_path / "tiny")
    config = json.loads((source / "config.json").read_text())
    changes = [{"moe_intermediate_size": 32}, {"n_routed_experts": 5}, {"num_attention_heads": 2}]
    for change in changes:
        (source / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=r"configuration says|is missing"):
            quantize(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def interrupt(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *, finished: bool = False
) -> None:
    """A run that ended, or was broken off after two units."""
    if finished:
        quantize(source, out)
        return
    commit = pipeline.CheckpointWriter.commit
    done = []

    def wrapped(self: Any, unit: Any, *args: Any, **kw: Any) -> None:
        if len(done) == 2:
            raise Crash
        done.append(unit)
        commit(self, unit, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.CheckpointWriter, "commit", wrapped)
        with pytest.raises(Crash):
            quantize(source, out)


def test_an_expert_that_no_token_reaches(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny")
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name][2] = -100.0
        save_file(tensors, shard, metadata={"format": "pt"})
    report = quantize(source, tmp_path / "out")
    starved = [r for r in report.linears if ".experts.2." in r.name]
    assert len(starved) == 12
    assert all((r.tokens, r.rung) == (0, "all-tokens") for r in starved)
    assert all(r.error <= r.rtn_error * 1.0001 for r in starved)
    assert verify(tmp_path / "out", source).mismatches == ()


def test_one_token_sequences(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny")
    settings = replace(SETTINGS, samples=3, sequence_length=1)
    report = quantize(source, tmp_path / "out", settings, tokens=tokens(3, 1))
    mtp = [r for r in report.linears if ".layers.4." in r.name]
    assert {(r.rung, r.fallback) for r in mtp} == {("weights-only", "rtn")}
    assert verify(tmp_path / "out", source).mismatches == ()


@pytest.mark.parametrize(
    "options",
    [{"tied": True}, {"shards": 1}, {"mtp": False}, {"source": "bf16"}, {"source": "ct-channel"}],
    ids=str,
)
def test_awkward_but_valid_sources(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_tiny(tmp_path / "tiny", **options)
    quantize(source, tmp_path / "out")
    assert verify(tmp_path / "out", source).mismatches == ()


def test_language_model_inside_a_larger_one(tmp_path: Path) -> None:
    """Kimi-K2.5's layout: another prefix, a vision tower, a tokenizer that is a Python file."""
    plain = write_tiny(tmp_path / "plain", model_type="deepseek_v3", mtp=False)
    source = write_nested(tmp_path / "kimi", plain)
    nested = json.loads((source / "config.json").read_text())["text_config"]
    assert "quantization_config" in nested
    (source / "tokenization_kimi.py").write_text("raise SystemExit('never run')")

    report = quantize(source, tmp_path / "out")
    assert verify(tmp_path / "out", source).mismatches == ()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written["text_config"]
    assert written["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {r.name.split(".layers.")[0] for r in report.linears} == {"language_model.model"}
    assert (tmp_path / "out" / "tokenization_kimi.py").exists()
    same = quantize(plain, tmp_path / "plain-out")
    assert [r.error for r in report.linears] == [r.error for r in same.linears]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.2.input_layernorm.weight", "model.layers.2.mlp.gate.weight"]
)
@pytest.mark.parametrize("settings", [SETTINGS, RTN], ids=["gptq", "rtn"])
def test_weights_that_are_not_finite(
    tmp_path: Path, name: str, value: float, settings: Settings
) -> None:
    source = write_tiny(tmp_path / "tiny")
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name].flatten()[3] = value
            save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        quantize(source, tmp_path / "out", settings)
    assert not (tmp_path / "out" / "config.json").exists()


def test_activations_that_overflow_name_the_layer(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny", source="bf16")
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        if (name := "model.layers.2.self_attn.o_proj.weight") in tensors:
            tensors[name].fill_(3e38)
            save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CalibrationError, match=r"layers?[ .]2"):
        quantize(source, tmp_path / "out")


def test_memory_is_as_planned_and_does_not_grow_with_layers(tmp_path: Path) -> None:
    """Peak memory of whole processes: 40 layers take what 8 take, and what the plan said."""
    script = (
        "import sys; from pathlib import Path; import torch\n"
        "from halfbyte.core import Settings\n"
        "from halfbyte.formats.checkpoint import open_checkpoint\n"
        "from halfbyte.quantize import pipeline\n"
        "from halfbyte.quantize.plan import make_plan\n"
        "from halfbyte.quantize.recipe import load_recipe\n"
        "settings = Settings(samples=4, sequence_length=16)\n"
        "plan = make_plan(open_checkpoint(sys.argv[1]), load_recipe('glm-5'), settings)\n"
        "tokens = torch.arange(64).reshape(4, 16) + 10\n"
        "peak = pipeline.run(plan, Path(sys.argv[2]), tokens=tokens).peak_bytes\n"
        "print(peak, plan.memory.host)\n"
    )
    peaks = []
    for layers in (8, 40):
        # About 25 MB a layer in float32, so that a leak of layers would show; 8 are more than is
        # read ahead and written behind.
        source = write_tiny(
            tmp_path / str(layers), layers=layers, hidden=256, moe_intermediate=256, experts=32
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(source), str(tmp_path / f"out-{layers}")],
            check=True,
            capture_output=True,
            text=True,
        )
        peak, planned = map(int, done.stdout.split()[-2:])
        assert 0.7 * planned < peak < 1.3 * planned
        peaks.append(peak)
    # Runs of one size differ by 70 MB, as threads happen to allocate; 3 MB a layer would show.
    assert peaks[1] - peaks[0] < 100_000_000
