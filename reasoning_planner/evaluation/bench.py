"""Every way to write the reasoning, against plain decoding on the same runtime, in one run.

Each scene is written by every method, one after the other in an order drawn anew, behind the same
prompt in the same cache; only the reasoning step is timed. Scenes are held out: first cold ones,
then cycles of a continuous drive. Hugging Face transformers with the same weights runs beside,
where it is installed. Leaves bench.json, a list of rows, and bench.html.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Sequence

from ..errors import ConfigError, DataError
from ..runtimes.factory import RUNTIMES
from ..speculative.cost_curve import CostCurve, save_cost_curve
from ..vla import VlaConfig
from .bench_methods import EASD, METHODS, PEERS, select
from .bench_report import write_page
from .bench_setup import Bench, plan_heats, run_heats
from .summary import describe_hardware, replace_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--methods", nargs="+", metavar="NAME",
                        help="of a row or of a family of rows (default all): "
                             + ", ".join([*METHODS, *PEERS]))
    parser.add_argument("--scenes", type=int, default=100,
                        help="cold scenes (default %(default)s); 0 only calibrates")
    parser.add_argument("--cycles", type=int, metavar="N",
                        help="cycles of the continuous drive (default: as many as scenes)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T",
                        help="0 decodes greedily (default %(default)s)")
    parser.add_argument("--calibrate", action="store_true",
                        help="write the measured T(k) into the manifest of the graphs")
    parser.add_argument("--out", type=Path, default=Path("out/bench"),
                        help="folder of bench.json and bench.html (default %(default)s)")
    parser.add_argument("--checkpoint", default="nano",
                        help="folder of a target, or the name of one that comes with the package "
                             "(default %(default)s)")
    parser.add_argument("--corpus", type=Path,
                        help="of texts (default: corpus.npz of the checkpoint)")
    parser.add_argument("--draft", type=Path,
                        help="release of train-draft (default: the checkpoint's folder draft)")
    parser.add_argument("--runtime", choices=RUNTIMES, default="ort")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 2),
                        help="of the runtime and of the peers' (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=VlaConfig.max_new_tokens,
                        metavar="N", help="longest text (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and write the report."""
    _check(args)
    methods, peers = select(args.methods)
    bench = Bench.load(args.checkpoint, args.corpus, args.draft, runtime=args.runtime,
                       threads=args.threads, max_new_tokens=args.max_new_tokens)
    curve = bench.calibrate()
    if args.calibrate:
        about = {"threads": args.threads, "hardware": describe_hardware()["cpu"]}
        save_cost_curve(curve, bench.engines, about)
        print(f"T(k) written into {bench.engines}", file=sys.stderr)
    if args.scenes == 0:
        print(json.dumps(curve.to_dict()) if args.json else _curve_line(curve))
        return 0
    _require_folder(args.out)
    if EASD in methods and bench.parts.draft:
        bench.calibrate_easd(args.temperature)
    cycles = args.scenes if args.cycles is None else args.cycles
    heats, left_out = plan_heats(bench, methods, peers, args.scenes, cycles, args.temperature)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    rows = run_heats(bench, heats)
    replace_text(args.out / "bench.json", json.dumps(rows, indent=1, allow_nan=False) + "\n")
    write_page(args.out / "bench.html", rows, bench.facts(left_out))
    print(json.dumps(rows, indent=1) if args.json else _summary(rows, args.out))
    return 0


def _check(args: argparse.Namespace) -> None:
    problems = []
    least = 0 if args.calibrate else 1
    if args.scenes < least:
        problems.append(f"--scenes: given {args.scenes}, expected {least} or more")
    if args.cycles is not None and args.cycles < 0:
        problems.append(f"--cycles: given {args.cycles}, expected 0 or more")
    if args.temperature != 0.0 and not 0.01 <= args.temperature <= 10.0:
        problems.append(f"--temperature: given {args.temperature}, expected 0 or 0.01 .. 10")
    if args.calibrate and args.runtime == "torch":
        problems.append("--calibrate: given --runtime torch, expected one whose engines have a "
                        "manifest")
    for name in ("threads", "max_new_tokens"):
        if getattr(args, name) < 1:
            problems.append(f"--{name.replace('_', '-')}: given {getattr(args, name)}, expected "
                            f"1 or more")
    if problems:
        raise ConfigError(problems)


def _require_folder(path: Path) -> None:
    """Told before anything is measured, not after."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out {path}: cannot be made ({error.strerror}), expected a folder to "
                        f"write to") from error


def _curve_line(curve: CostCurve) -> str:
    costs = ", ".join(f"T({k}) {ms:.2f} ms" for k, ms in zip(curve.sizes, curve.cost_ms))
    return f"{costs}; a round besides its pass {curve.round_ms:.2f} ms"


def _summary(rows: Sequence[dict[str, Any]], out: Path) -> str:
    """A table for the terminal."""
    width = max(len(row["method"]) for row in rows)
    lines = [f"{'method':<{width}}  kind        T    tau    p50 ms  speed-up  95 % interval  "
             f"same"]
    for row in rows:
        low, high = row["speedup_ci95"]
        same = "-" if row["exact_match_rate"] is None else f"{row['exact_match_rate']:.1%}"
        lines.append(f"{row['method']:<{width}}  {row['kind']:<10}  {row['temperature']:<3g}  "
                     f"{row['acceptance_length']:<5.2f}  {row['reasoning_ms_p50']:<6.1f}  "
                     f"{row['speedup']:<8.2f}  {low:5.2f} .. {high:<5.2f} {same}")
    return "\n".join([*lines, f"report: {out / 'bench.html'}"])
