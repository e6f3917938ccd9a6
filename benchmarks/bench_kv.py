"""What an FP8 KV cache costs, by itself and together with INT4 weights: the gate's word on each.

    python -m benchmarks.bench_kv CHECKPOINT --int4 INT4 --tasks TASKS --text heldout.jsonl

The baseline is CHECKPOINT with a BF16 cache. Against it: CHECKPOINT with an FP8 cache in both forms
of rows, and INT4 with a BF16 and with an FP8 cache. All answer the same questions. Prints a line of
JSON for each, and the table of docs/results.md at the end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from halfbyte.evals.engines import Backend
from halfbyte.evals.evaluation import Evaluation
from halfbyte.evals.gate import GateVerdict, gate
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import EvalReport
from halfbyte.kvcache.layout import Kv
from halfbyte.progress import SilentProgress

TASKS = ("glm_gsm_like", "glm_arc_like", "glm_mmlu_like", "glm_recall", "glm_tool_call")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--int4", type=Path, help="INT4 checkpoint made of it")
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--task", action="append", help="one of them; may be repeated [all]")
    parser.add_argument("--limit", type=int, help="documents of each task [all]")
    parser.add_argument("--windows", type=int, help="windows of 512 tokens of the text [all]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--work", type=Path, default=Path("build/bench-kv"))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    source: Path = arguments.checkpoint

    def evaluated(folder: Path, kv: Kv) -> EvalReport:
        path: Path = arguments.work / f"{folder.name}-{kv}.json"
        if not path.exists():
            asked = Evaluation(
                folder,
                text=arguments.text,
                baseline=source,
                sequence_length=512,
                max_windows=arguments.windows,
                tasks=arguments.tasks,
                names=tuple(arguments.task or TASKS),
                engine=Backend(kv_cache=kv),
                limit=arguments.limit,
                batch_size=arguments.batch_size,
                device=arguments.device,
            )
            asked.run(None, SilentProgress()).write(path)
        return EvalReport.read(path)

    baseline = evaluated(source, "bf16")
    asked: list[tuple[str, Path, Kv]] = [
        ("FP8 cache, rows that scale themselves", source, "fp8"),
        ("FP8 cache, raw rows", source, "fp8-raw"),
    ]
    if arguments.int4 is not None:
        asked.append(("INT4 weights", arguments.int4, "bf16"))
        asked.append(("INT4 weights and FP8 cache", arguments.int4, "fp8"))
    judged = []
    for name, folder, kv in asked:
        candidate = evaluated(folder, kv)
        verdict = gate(baseline, candidate, load_policy("default"))
        judged.append((name, candidate, verdict))
        record = verdict.to_json()
        kept = ("verdict", "kv_cache", "mean_change_points", "rows", "reasons")
        print(json.dumps({"candidate": name, **{key: record[key] for key in kept}}), flush=True)
    print("\n".join(table(judged)))


def table(judged: list[tuple[str, EvalReport, GateVerdict]]) -> list[str]:
    """A row to each task and for the mean: change in points, its limits, and items lost : won."""
    lines = [f"| | {' | '.join(name for name, *_ in judged)} |", "|---" * (len(judged) + 1) + "|"]
    tasks = [row.task for row in judged[0][2].rows if row.decides]
    for task in tasks:
        cells = []
        for *_, verdict in judged:
            row = next(row for row in verdict.rows if row.decides and row.task == task)
            limits = f"{row.change.low:+.2f} to {row.change.high:+.2f}"
            change = f"{float(row.delta_points):+.2f} ({limits}), {row.lost} : {row.won}"
            cells.append(change)
        count = next(row.count for row in judged[0][2].rows if row.task == task)
        lines.append(f"| {task}, {count:,} items | {' | '.join(cells)} |")
    means = [verdict.mean for *_, verdict in judged]
    shown = [
        f"{m.change.estimate:+.2f} ({m.change.low:+.2f} to {m.change.high:+.2f})"
        for m in means
        if m
    ]
    lines.append(f"| mean | {' | '.join(shown)} |")
    texts = [report.text.divergence for _, report, _ in judged if report.text is not None]
    lines.append(f"| mean KL, nats | {' | '.join(f'{d.mean_kl:.5f}' for d in texts if d)} |")
    lines.append(f"| top-1 % | {' | '.join(f'{100 * d.top1_agreement:.2f}' for d in texts if d)} |")
    lines.append(f"| gate | {' | '.join(verdict.verdict for *_, verdict in judged)} |")
    return lines


if __name__ == "__main__":
    main()
