"""Run benchmarks one after the other, each in a process, at small sizes.

    python -m benchmarks.suite [--only NAME ...] [--repeat N]        all: about an hour on 2 cores

Results go to build/benchmarks/COMMIT: NAME.json (with --repeat NAME.1.json, NAME.2.json, ...), and the output
to NAME.log. An existing result is not measured again, so an interrupted suite continues. A benchmark that
fails does not stop the others. The documentation uses the default sizes of each benchmark: run it directly
with ``--json docs/results/NAME.json``, then ``python -m benchmarks.performance``.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import plain_parser, show
from scalingnote.core.log import configure, get_logger

TIMEOUT_S = 3600.0
RUNS = "--set run_dir={folder}/runs --set dataset.max_documents=2000"
TRIALS = "--trials {folder}/trials.jsonl --run-dir {folder}/runs"
FINISHED_RUN = "{folder}/quickstart"
# Arguments by name; {folder} is common to the runs of one commit and round.
SMALL: dict[str, str] = {
    "api_fuzz": f"--run {FINISHED_RUN} --examples 10",
    "collect": "--queries 10000 100000",
    "decoders": "--layers 2 --steps 10",
    "delta": "--documents 20000 --delta 2000 --queries 200 --seeds 1 --operations 100 --kills 8",
    "distillation": "--datasets medquad --methods scalingdual scalingnote-1l lookup-qkd --backbones scratch "
    f"--seeds 1 --steps 30 --set dataset.max_documents=2000 --set distill.epochs=3 {TRIALS}",
    "encode": "--documents 1536 --rounds 1",
    "fanout": "--queries 2000 --rounds 1",
    "front_door": "--run-dir {folder}/front_door --sets feedbackqa --students table --seeds 1 "
    "--set pseudo_queries.count=10000",
    "house": "",
    "index": f"--documents 50000 --queries 200 --steps 20 {RUNS}",
    "ladder": "--folder {folder}/ladder --set run_dir={folder}/runs --set ladder.pairs=[224,448,896,1792] "
    "--set ladder.seeds=[0]",
    "live_index": "--seeds 1 --operations 1500 --kills 6 --documents 40000 --queries 200 --steps 6",
    "long_documents": "--documents 400 --count 2000 --run-dir {folder}/long_documents",
    "methods": f"--backbones scratch --seeds 1 --steps 30 10 {RUNS}",
    "mteb_agreement": "--run-dir {folder}/mteb_agreement --sets nfcorpus --documents 16",
    "native": "--documents 256 --rounds 3",
    "package": "--rounds 3",
    "query_encoder": "--rounds 5 --batches 1 64",
    "reproduce": "--datasets medquad --backbones minilm-native --seeds 1 --steps 8 "
    f"--set dataset.max_documents=1000 --set distill.epochs=1 {TRIALS}",
    "scale": "--documents 20000 40000",
    "serve": "--documents 20000 --turns 6 --concurrency 1 16 --folder {folder}/serve",
    "serve_faults": f"--run {FINISHED_RUN} --swaps 4 --operations 1000 --kills 3",
    "sparse_index": "--documents 10000 50000",
    "teacher": "--rounds 1 --teacher 6 896 14 4864",
    "teachers": "--documents 200 --count 200 --run-dir {folder}/teachers",
    "train": "--rounds 1 --largest 256 --batch 32",
    "zero_shot": "--run-dir {folder}/front_door --sets feedbackqa --sources chorus_icecat "
    "--set pseudo_queries.count=10000",
}
MAKE_RUN = (
    f"run configs/quickstart/python_docs.yaml --set run_dir={FINISHED_RUN} "
    "--set dataset.max_documents=2000 --set train.epochs=1 --set distill.epochs=2"
)
log = get_logger("suite")


def main() -> None:
    """Run benchmarks without a result; exit with 1 if one failed."""
    parser = plain_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SMALL, default=[*SMALL], metavar="NAME")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, default: %(default)s")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat is {options.repeat}: give 1 or more")
    configure()
    failed = run_all(options.only, Path("build/benchmarks") / commit(), repeat=options.repeat)
    for path in failed:
        print(f"FAILED: {path.stem}: see {path.with_suffix('.log')}")
    sys.exit(1 if failed else 0)


def run_all(names: Sequence[str], folder: Path, *, repeat: int) -> list[Path]:
    """Run benchmarks, round after round, and return the results that are missing because one failed."""
    failed = []
    for number in range(1, repeat + 1):
        shared = folder / str(number)
        shared.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = folder / (f"{name}.{number}.json" if repeat > 1 else f"{name}.json")
            if path.exists():
                continue
            log.info("%s", path)
            if not run(commands(name, path.with_suffix(".unfinished"), shared), path):
                failed.append(path)
    rows = [{"benchmark": path.stem} for path in sorted(folder.glob("*.json"))]
    if rows:
        show(f"Results in {folder}", rows)
    return failed


def commands(name: str, result: Path, shared: Path) -> list[list[str]]:
    """Return the commands of one benchmark; if it needs a finished run, the first command makes it."""
    arguments = SMALL[name]
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(result)]
    command += shlex.split(arguments.format(folder=shared))
    if FINISHED_RUN not in arguments:
        return [command]
    words = shlex.split(MAKE_RUN.format(folder=shared))
    return [[sys.executable, "-m", "scalingnote.cli.main", *words], command]


def run(steps: Sequence[Sequence[str]], path: Path) -> bool:
    """Run commands until one fails; the result gets its name after all have succeeded."""
    with path.with_suffix(".log").open("w", encoding="utf-8") as output:
        for words in steps:
            process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
            try:
                status = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = -1
                log.error("%s: not done after %.0f s", path.stem, TIMEOUT_S)
            finally:
                _kill_group(process)
            if status:
                return False
    path.with_suffix(".unfinished").replace(path)
    return True


def commit() -> str:
    """Return the version of the code: `git describe`, with -dirty if a file differs from the commit."""
    words = ["git", "describe", "--always", "--dirty"]
    process = subprocess.run(words, check=False, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(
            f"results are stored by commit: run this in a git checkout ({process.stderr.strip()})"
        )
    return process.stdout.strip()


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a benchmark and every process that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


if __name__ == "__main__":
    main()
