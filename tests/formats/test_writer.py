"""What the writer writes is what safetensors reads; a crash never costs a committed unit."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from halfbyte.core import (
    Checkpoint,
    MemoryEstimate,
    OutputTensor,
    Plan,
    Recipe,
    Settings,
    StoredWeight,
    TensorPlan,
    Unit,
    tensor_bytes,
)
from halfbyte.errors import OutputError, ResumeError
from halfbyte.formats import writebehind
from halfbyte.formats.folder import WORK_FOLDER, prepare_folder
from halfbyte.formats.layout import lay_out_shards
from halfbyte.formats.rows import InMemory
from halfbyte.formats.writer import CheckpointWriter

TENSORS = {
    "embed.weight": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
    "layers.0.a.weight": torch.randint(-9, 9, (3, 8), dtype=torch.int32),
    "layers.0.b.weight": torch.randn(5).to(torch.float8_e4m3fn),
    "layers.1.a.weight": torch.randn(2, 2, dtype=torch.float32),
    "layers.1.shape": torch.tensor([2, 2]),
    "head.weight": torch.tensor(1.5, dtype=torch.float16),
}
DTYPES = {
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float16: "F16",
}
UNITS = {"embedding": 1, "layers.0": 2, "layers.1": 2, "head": 1}
IDENTITY = {"recipe": "r", "settings": {"seed": 0, "method": "rtn"}}


def make_plan(source: Path, max_bytes: int = 60, disk: int = 1000) -> Plan:
    outputs = [OutputTensor(n, DTYPES[t.dtype], tuple(t.shape)) for n, t in TENSORS.items()]
    left, units = list(outputs), []
    for name, count in UNITS.items():
        part, left = left[:count], left[count:]
        plans = tuple(
            TensorPlan(StoredWeight(o.name, o.shape, "plain", {}), "copy", None, 0, (o,))
            for o in part
        )
        units.append(Unit(name, "other", None, plans))
    source.mkdir(exist_ok=True)
    (source / "tokenizer.json").write_bytes(b'{"x": "\xc3\xa9"}')
    return Plan(
        checkpoint=Checkpoint(source, {}, {}, {}, ("tokenizer.json",)),
        recipe=Recipe("r", "", ()),
        settings=Settings(),
        units=tuple(units),
        shards=lay_out_shards(outputs, max_bytes),
        quantization_config=None,
        memory=MemoryEstimate(0, 0, {}),
        disk=disk,
        warnings=(),
        fingerprint="f",
    )


def write_unit(writer: CheckpointWriter, unit: Unit, *, hold: bool = False) -> None:
    for tensor in reversed(unit.tensors):  # any order inside a unit
        writer.write(tensor.name, TENSORS[tensor.name])
    writer.commit(unit, {"unit": unit.name}, hold=hold)


def write_all(folder: Path, plan: Plan, start: int = 0) -> None:
    with CheckpointWriter(folder, plan, IDENTITY) as writer:
        for unit in plan.units[start:]:
            write_unit(writer, unit)
        writer.finish({"model_type": "x"}, {"report": 1, "shards": writer.shard_hashes()})


def written_and_new(tmp_path: Path, plan: Plan) -> tuple[Path, Path]:
    """A folder with all of the plan in it, and one that is prepared for it."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    for folder in (whole, out):
        prepare_folder(folder, plan, resume=False, overwrite=False)
    write_all(whole, plan)
    return whole, out


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(tmp_path / "source")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_safetensors_reads_what_was_written(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    write_all(out, plan)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(TENSORS)  # model order
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    assert len(set(index["weight_map"].values())) == len(plan.shards) > 2
    for name, file in index["weight_map"].items():
        stored = load_file(out / file)[name]
        assert stored.dtype == TENSORS[name].dtype
        bits = [t.reshape(-1).view(torch.uint8) for t in (stored, TENSORS[name])]
        assert torch.equal(*bits)
        with safe_open(out / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
    assert (out / "tokenizer.json").read_bytes() == b'{"x": "\xc3\xa9"}'
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x"}
    assert not (out / WORK_FOLDER).exists()
    assert not list(out.rglob("*.partial"))
    hashes = json.loads((out / "halfbyte_report.json").read_text())["shards"]
    assert hashes == {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.glob("*.safetensors")
    }


@pytest.mark.parametrize("units_before_the_crash", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("max_bytes", [60, 10_000])
def test_resume_gives_the_same_bytes(
    tmp_path: Path, units_before_the_crash: int, max_bytes: int
) -> None:
    plan = make_plan(tmp_path / "source", max_bytes)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    prepare_folder(whole, plan, resume=False, overwrite=False)
    write_all(whole, plan)
    prepare_folder(broken, plan, resume=False, overwrite=False)
    with CheckpointWriter(broken, plan, IDENTITY) as writer:
        for unit in plan.units[:units_before_the_crash]:
            write_unit(writer, unit)
        for unit in plan.units[units_before_the_crash : units_before_the_crash + 1]:
            # Half a unit, with other values than the resumed run will write.
            name = unit.tensors[-1].name
            writer.write(name, torch.zeros_like(TENSORS[name]))
    with open(broken / WORK_FOLDER / "journal.jsonl", "ab") as journal:
        journal.write(b'{"unit": "layers.1", "shar')  # the line that the crash cut
    assert not (broken / "config.json").exists()
    prepare_folder(broken, plan, resume=True, overwrite=False)
    write_all(broken, plan, start=units_before_the_crash)
    assert contents(broken) == contents(whole)


class Crash(BaseException):
    """The process ends here: no handler of ours may run."""


def test_a_crash_before_any_system_call_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path / "source")
    whole = tmp_path / "whole"

    def write(folder: Path) -> None:
        prepare_folder(folder, plan, resume=True, overwrite=False)
        with CheckpointWriter(folder, plan, IDENTITY) as writer:
            for unit in plan.units[len(writer.commits) :]:
                write_unit(writer, unit)
            writer.finish({"model_type": "x"}, {"shards": writer.shard_hashes()})

    calls = left = 0
    counter = threading.Lock()

    def counting(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, left
            with counter:
                calls, left = calls + 1, left - 1
                crashes = left == 0
            if crashes:
                raise Crash
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "pwrite", "ftruncate", "open", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    write(whole)
    total = calls
    assert total > 60
    for point in range(1, total + 1):
        folder = tmp_path / f"crash-{point}"
        left = point
        with pytest.raises(Crash):
            write(folder)
        left = 0
        if not (folder / "config.json").exists():  # config.json says that all the rest is there
            write(folder)
        shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
        assert contents(folder) == contents(whole), point


def test_resume_refuses_another_run_and_names_the_difference(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, plan.units[0])
    other = {"recipe": "r", "settings": {"seed": 1, "method": "rtn"}}
    with pytest.raises(ResumeError, match=r"settings\.seed was 0, now 1"):
        CheckpointWriter(out, plan, other)


def test_resume_refuses_a_shard_that_changed(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, plan.units[0])
        write_unit(writer, plan.units[1])
    shard = sorted(out.glob("model-*"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ResumeError, match=shard.name):
        CheckpointWriter(out, plan, IDENTITY)


def test_resume_refuses_a_damaged_journal(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, plan.units[0])
    journal = out / WORK_FOLDER / "journal.jsonl"
    data = bytearray(journal.read_bytes())
    data[-20] ^= 1
    journal.write_bytes(data)
    with pytest.raises(ResumeError, match=r"journal\.jsonl is damaged"):
        CheckpointWriter(out, plan, IDENTITY)


def test_resume_refuses_another_layout_of_shards(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, plan.units[0])
    with pytest.raises(ResumeError, match="the plan has no such shard"):
        CheckpointWriter(out, make_plan(tmp_path / "source", 10_000), IDENTITY)


def test_two_processes_cannot_write_one_folder(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    with (
        CheckpointWriter(out, plan, IDENTITY),
        pytest.raises(OutputError, match="another process is writing"),
    ):
        CheckpointWriter(out, plan, IDENTITY)
    CheckpointWriter(out, plan, IDENTITY).close()


def test_processes_of_one_run_write_together(tmp_path: Path, plan: Plan) -> None:
    whole, out = written_and_new(tmp_path, plan)
    assert list(plan.shards[0].offsets) == ["embed.weight"]
    with CheckpointWriter(out, plan, IDENTITY, plan.units[:1]) as first:
        with CheckpointWriter(out, plan, IDENTITY, plan.units[1:], joins=True) as second:
            write_unit(second, plan.units[1])
            write_unit(first, plan.units[0])
            assert {c.unit for w in (first, second) for c in w.commits} == set(list(UNITS)[:2])
            with open(out / WORK_FOLDER / "journal.jsonl", "ab") as journal:
                journal.write(b'{"unit": "layers.1", "shar')  # of a third that was killed
            for unit in plan.units[2:]:
                write_unit(second, unit)
        first.finish({"model_type": "x"}, {"report": 1, "shards": first.shard_hashes()})
    assert contents(out) == contents(whole)


def test_the_last_process_of_a_run_keeps_the_folder(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    first = CheckpointWriter(out, plan, IDENTITY, plan.units[:1])
    with CheckpointWriter(out, plan, IDENTITY, plan.units[1:], joins=True):
        first.close()
        with pytest.raises(OutputError, match="another process is writing"):
            CheckpointWriter(out, plan, IDENTITY)
    CheckpointWriter(out, plan, IDENTITY).close()


def test_a_process_checks_the_shards_that_it_goes_on_with(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, plan.units[0])
        write_unit(writer, plan.units[1])
    (out / plan.shards[0].file).unlink()
    with CheckpointWriter(out, plan, IDENTITY, plan.units[1:]) as writer:
        assert len(writer.commits) == 2
    with pytest.raises(ResumeError, match=plan.shards[0].file):
        CheckpointWriter(out, plan, IDENTITY, plan.units[:1])


def test_resume_does_not_start_among_the_files_of_an_earlier_run(
    tmp_path: Path, plan: Plan
) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    write_all(out, plan)
    (out / "config.json").unlink()  # where a crash in --overwrite may leave it
    with pytest.raises(OutputError, match="holds no interrupted run"):
        prepare_folder(out, plan, resume=True, overwrite=False)


def test_a_unit_is_not_committed_before_it_is_whole(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, plan.units[0])
        writer.write("layers.0.a.weight", TENSORS["layers.0.a.weight"])
        with pytest.raises(AssertionError, match=r"lacks 1 tensors, first layers\.0\.b\.weight"):
            writer.commit(plan.units[1], {})
        with pytest.raises(AssertionError, match="written twice"):
            writer.write("layers.0.a.weight", TENSORS["layers.0.a.weight"])
        with pytest.raises(AssertionError, match="not planned"):
            writer.write("layers.9", TENSORS["layers.0.a.weight"])
        with pytest.raises(AssertionError, match=r"planned F8_E4M3 \[5\]"):
            writer.write("layers.0.b.weight", torch.zeros(5))
        with pytest.raises(AssertionError, match="1 of 4 units"):
            writer.finish({}, {})


def test_output_folder_is_refused(tmp_path: Path, plan: Plan) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"not empty.*thesis\.txt"):
        prepare_folder(full, plan, resume=False, overwrite=False)
    for options in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(OutputError, match=r"thesis\.txt, which halfbyte did not write"):
            prepare_folder(full, plan, **options)
    assert [path.name for path in full.iterdir()] == ["thesis.txt"]
    with pytest.raises(OutputError, match="is a file"):
        prepare_folder(full / "thesis.txt", plan, resume=False, overwrite=False)
    with pytest.raises(OutputError, match="cannot write"):
        prepare_folder(full / "thesis.txt" / "out", plan, resume=False, overwrite=False)
    for inside_or_around in (tmp_path / "source" / "out", tmp_path):
        with pytest.raises(OutputError, match="lie in each other"):
            prepare_folder(inside_or_around, plan, resume=False, overwrite=False)
    with pytest.raises(OutputError, match="too small"):
        prepare_folder(
            tmp_path / "out",
            make_plan(tmp_path / "source", disk=1 << 60),
            resume=False,
            overwrite=False,
        )
    assert not (tmp_path / "out").exists()


def test_overwrite_clears_what_an_earlier_run_left(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    write_all(out, plan)
    before = contents(out)
    (out / "precious.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"precious\.txt, which halfbyte did not write"):
        prepare_folder(out, plan, resume=False, overwrite=True)
    assert (out / "precious.txt").read_text() == "mine"
    (out / "precious.txt").unlink()
    (out / "model-00001-of-00099.safetensors.partial").write_bytes(b"of another layout")
    prepare_folder(out, plan, resume=False, overwrite=True)
    write_all(out, plan)
    assert contents(out) == before


def test_overwrite_keeps_the_earlier_run_when_there_is_no_room(tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    write_all(out, plan)
    before = contents(out)
    huge = make_plan(tmp_path / "source", disk=1 << 60)
    with pytest.raises(OutputError, match="too small"):
        prepare_folder(out, huge, resume=False, overwrite=True)
    assert contents(out) == before


def test_overwrite_can_be_repeated_after_a_crash_in_it(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    write_all(out, plan)
    before = contents(out)
    unlink = Path.unlink
    for survivors in range(len(before)):

        def failing(path: Path, left: list[int] = [survivors], **kw: Any) -> None:  # noqa: B006
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            unlink(path, **kw)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", failing)
            with pytest.raises(Crash):
                prepare_folder(out, plan, resume=False, overwrite=True)
        assert survivors == 0 or not (out / "config.json").exists()
        prepare_folder(out, plan, resume=False, overwrite=True)
        write_all(out, plan)
        assert contents(out) == before


@given(
    st.lists(
        st.tuples(st.sampled_from(["I64", "F32", "BF16", "F8_E4M3"]), st.integers(1, 40)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 400),
)
def test_layout_is_complete_aligned_and_within_bounds(
    sizes: list[tuple[str, int]], max_bytes: int
) -> None:
    outputs = [OutputTensor(f"t{i}", dtype, (n,)) for i, (dtype, n) in enumerate(sizes)]
    shards = lay_out_shards(outputs, max_bytes)
    assert [n for s in shards for n in s.offsets] == [o.name for o in outputs]
    dtype_of = {o.name: o for o in outputs}
    for shard in shards:
        position = len(shard.header)
        assert position % 8 == 0
        for name, (begin, end) in shard.offsets.items():
            output = dtype_of[name]
            assert begin == position
            assert begin % tensor_bytes(output.dtype, (1,)) == 0
            assert end - begin == output.nbytes
            position = end
        assert position == shard.nbytes
        assert shard.nbytes - len(shard.header) <= max_bytes or len(shard.offsets) == 1


# In the background


def writing_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("writer", "committer", "hasher"))]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "open", "ftruncate"])
def test_a_full_disk_is_reported_at_the_latest_by_finish(
    tmp_path: Path, plan: Plan, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed before stays, and the run can be resumed."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare_folder(whole, plan, resume=False, overwrite=False)
    write_all(whole, plan)
    prepare_folder(out, plan, resume=False, overwrite=False)
    before = open_files()
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        for unit in plan.units[:2]:
            write_unit(writer, unit)
        assert len(writer.commits) == 2

    def write_rest() -> None:
        with CheckpointWriter(out, plan, IDENTITY) as writer:

            def full(*_: Any, **__: Any) -> Any:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            with monkeypatch.context() as patch:
                patch.setattr(os, call, full)
                for unit in plan.units[2:]:
                    write_unit(writer, unit)
                writer.finish({}, {})

    with pytest.raises(OutputError, match="No space left on device") as caught:
        write_rest()
    assert "make room, then repeat the command with --resume" in str(caught.value.hint)
    assert writing_threads() == []
    assert open_files() == before
    write_all(out, plan, start=2)
    assert contents(out) == contents(whole)


def test_leaving_without_finish_still_reports_what_failed(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write() -> None:
        with CheckpointWriter(out, plan, IDENTITY) as writer:
            monkeypatch.setattr(os, "pwrite", full)
            writer.write("embed.weight", TENSORS["embed.weight"])

    with pytest.raises(OutputError, match="No space left"):
        write()


def test_a_unit_in_the_journal_is_on_the_disk(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte that a line speaks of was written and synced before the line was."""
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    events: list[tuple[str, str]] = []
    pwrite, fsync = os.pwrite, os.fsync

    def name_of(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def written(descriptor: int, *args: Any) -> int:
        events.append(("write", name_of(descriptor)))
        return pwrite(descriptor, *args)

    def synced(descriptor: int) -> None:
        events.append(("sync", name_of(descriptor)))
        fsync(descriptor)

    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "fsync", synced)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        for unit in plan.units:
            writer.save(f"state-{unit.name}.safetensors", {"hidden": InMemory(torch.ones(3, 3))})
            write_unit(writer, unit)
    dirty: set[str] = set()
    lines = 0
    for what, file in events:
        if what == "write":
            dirty.add(file)
        elif file == "journal.jsonl":
            lines += 1
            assert not dirty
        else:
            dirty.discard(file)
    assert lines == 1 + len(plan.units)


def test_the_state_is_named_by_the_commit_and_may_change_after_it_was_saved(
    tmp_path: Path, plan: Plan
) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    hidden = torch.randn(5, 7, 3).bfloat16()
    topk = torch.randint(0, 9, (5, 7, 2), dtype=torch.int32)
    tensors = {"hidden": InMemory(hidden), "topk": InMemory(topk)}
    expected = hidden.clone()
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, plan.units[0])
        for number, unit in enumerate(plan.units[1:3]):
            hidden.copy_(expected)
            writer.save(f"state-{number}.safetensors", tensors)
            hidden.zero_()
            write_unit(writer, unit)
        write_unit(writer, plan.units[3])
        states = [commit.record["state"] for commit in writer.commits]
    assert states[0] is None
    assert states[3] is None
    assert states[1]["file"] == "state-0.safetensors"
    path = out / WORK_FOLDER / "state-1.safetensors"
    assert states[2] == {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    stored = load_file(path)
    assert torch.equal(stored["hidden"], expected)
    assert torch.equal(stored["topk"], topk)
    assert not (out / WORK_FOLDER / "state-0.safetensors").exists()


def test_a_held_unit_becomes_final_with_the_next_one(tmp_path: Path, plan: Plan) -> None:
    """Until then no shard gets its final name, and who resumes does the unit again."""
    whole, out = written_and_new(tmp_path, plan)
    first, *rest = plan.units
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, first)
        for unit in rest[:-1]:
            write_unit(writer, unit, hold=True)
        assert [commit.unit for commit in writer.commits] == [first.name]
    assert len(list(out.glob("*.safetensors.partial"))) > 1
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        assert [commit.unit for commit in writer.commits] == [first.name]
        for unit in rest:
            write_unit(writer, unit, hold=unit is not rest[-1])
        assert [commit.unit for commit in writer.commits] == [u.name for u in plan.units]
        writer.finish({"model_type": "x"}, {"report": 1, "shards": writer.shard_hashes()})
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("piece", [7, 1000])
def test_rows_of_a_tensor_may_come_one_after_the_other(
    tmp_path: Path, plan: Plan, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writebehind, "PIECE", piece)
    whole, out = written_and_new(tmp_path, plan)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        for unit in plan.units:
            for planned in unit.tensors:
                tensor = TENSORS[planned.name]
                if not tensor.ndim:
                    writer.write(planned.name, tensor)
                    continue
                with pytest.raises(AssertionError, match="lacks"):
                    writer.commit(unit, {})
                for row in range(len(tensor)):
                    writer.write(planned.name, tensor[row : row + 1], (row, row + 1))
                with pytest.raises(AssertionError, match="written twice"):
                    writer.write(planned.name, tensor[:1], (0, 1))
            writer.commit(unit, {"unit": unit.name})
        writer.finish({"model_type": "x"}, {"report": 1, "shards": writer.shard_hashes()})
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("piece", [7, 1000])
def test_tensors_written_together_lie_where_they_would(
    tmp_path: Path, plan: Plan, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several shards and units at once, in no order, with a gap that is filled later."""
    monkeypatch.setattr(writebehind, "PIECE", piece)
    whole, out = written_and_new(tmp_path, plan)
    late = "layers.0.b.weight"
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        writer.write_together({n: t for n, t in reversed(TENSORS.items()) if n != late})
        with pytest.raises(AssertionError, match="written twice"):
            writer.write_together({"head.weight": TENSORS["head.weight"]})
        writer.write_together({late: TENSORS[late]})
        for unit in plan.units:
            writer.commit(unit, {"unit": unit.name})
        writer.finish({"model_type": "x"}, {"report": 1, "shards": writer.shard_hashes()})
    assert contents(out) == contents(whole)


def test_more_is_written_while_a_unit_is_made_durable(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    fsync, slow, later = os.fsync, threading.Event(), threading.Event()
    pwrite = os.pwrite
    embedding, following = plan.units[0], plan.units[1].tensors[0].name
    bytes_of_following = TENSORS[following].numpy().tobytes()

    def stalled(descriptor: int) -> None:
        if threading.current_thread().name.startswith("hasher"):
            slow.wait()
        fsync(descriptor)

    def noted(descriptor: int, data: memoryview, place: int) -> int:
        if bytes(data) == bytes_of_following:
            later.set()
        return pwrite(descriptor, data, place)

    monkeypatch.setattr(os, "fsync", stalled)
    monkeypatch.setattr(os, "pwrite", noted)
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        write_unit(writer, embedding)
        writer.write(following, TENSORS[following])
        assert later.wait(60)
        assert b"embedding" not in (out / WORK_FOLDER / "journal.jsonl").read_bytes()
        slow.set()
        assert [commit.unit for commit in writer.commits] == [embedding.name]


def test_an_interrupt_keeps_what_was_committed_and_leaves_no_thread(
    tmp_path: Path, plan: Plan
) -> None:
    out = tmp_path / "out"
    prepare_folder(out, plan, resume=False, overwrite=False)
    before = open_files()

    def interrupted() -> None:
        with CheckpointWriter(out, plan, IDENTITY) as writer:
            for unit in plan.units[:3]:
                write_unit(writer, unit)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert writing_threads() == []
    assert open_files() == before
    with CheckpointWriter(out, plan, IDENTITY) as writer:
        assert [commit.unit for commit in writer.commits] == list(UNITS)[:3]
