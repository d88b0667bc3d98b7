"""Benchmarks one after the other, each in a process of its own: from a commit to its folder of results.

    make benchmarks                                   an hour to an hour and a half on 2 cores
    python -m benchmarks.suite [--only NAME ...] [--repeat N] [--size full] [--commit-results]
    python -m benchmarks.suite --against main --repeat 5 --only index serve

Results lie in build/benchmarks/COMMIT (`-full` behind it for the sizes of docs/results): NAME.json, or
NAME.1.json to NAME.N.json with --repeat, and what was printed in NAME.log. COMMIT is what `git describe`
says, and for a tree with changes a hash of them. What is there is not run again, so an interrupted suite goes
on where it was; what fails is told at the end, and the others run. Sizes: benchmarks/sizes.py.

`--against COMMIT` runs that commit, too, from a checkout of its own and in turns with this one, so that what
the machine does meanwhile falls on both; then it prints what moved, as benchmarks.compare does.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks import compare, performance, trials
from benchmarks.report import show
from benchmarks.sizes import BENCHMARKS, Benchmark, Size
from scalingnote.log import configure, get_logger

HERE = Path(__file__).parents[1]
BUILD, RESULTS = Path("build/benchmarks"), Path("docs/results")
HUNG = -1000
PATIENCE = 6  # times what a benchmark should take, then it is ended as hung
log = get_logger("suite")


@dataclass(frozen=True)
class Run:
    """One benchmark, once: where its result goes, and the checkout whose code it is."""

    benchmark: Benchmark
    path: Path
    folder: Path  # for what else it leaves
    tree: Path = HERE


def main() -> None:
    """Parse arguments, run what is missing, show all, say what failed; exits 1 if something did."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, default: %(default)s")
    parser.add_argument("--size", choices=("small", "full"), default="small", help="default: %(default)s")
    parser.add_argument(
        "--commit-results", action="store_true", help="copy to docs/results; of full size only"
    )
    parser.add_argument("--against", metavar="COMMIT", help="run it, too, in turns, and tell what moved")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat is {options.repeat}: give 1 or more")
    if options.commit_results and options.size != "full":
        parser.error("--commit-results goes with --size full: the documents quote those sizes")
    configure()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # what runs is ended too, see `ended`
    os.chdir(HERE)
    folder = _folder(commit(), options.size)
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name in options.only]
    here = [benchmark for benchmark in chosen if not missing(benchmark)]
    runs = own = plan(here, folder, repeat=options.repeat)
    if options.against:
        before = _folder(_git("describe", "--always", options.against).strip(), options.size)
        if before == folder:
            parser.error(f"--against {options.against} is the commit that is checked out: name another")
        tree = checkout(options.against)
        there = [benchmark for benchmark in here if (tree / f"benchmarks/{benchmark.name}.py").exists()]
        runs = in_turns(plan(there, before, repeat=options.repeat, tree=tree), own)
    left = [run for run in runs if not run.path.exists()]
    log.info("%s: %d runs, %d of them are there", folder, len(runs), len(runs) - len(left))
    failed = run_all(left, options.size)
    if options.commit_results:
        keep(own)
    performance.update()
    rows = performance.rows_of(performance.read(folder), only={benchmark.name for benchmark in here})
    cells = ("part", "what was measured", "ours", "compared with", "ratio", "bar")
    if rows:
        title = f"This machine, {options.size} sizes: {folder}"
        show(title, [{cell: row[cell] for cell in cells} for row in rows])
    for benchmark in chosen:
        if why := missing(benchmark):
            print(f"not run here: {benchmark.name}: {why}")
    for run in failed:
        print(f"FAILED: {run.benchmark.name}: {log_of(run)}")
    worse = bool(options.against) and compare.tell(before, folder, partial=True)
    sys.exit(1 if failed or worse else 0)


def plan(benchmarks: Sequence[Benchmark], folder: Path, *, repeat: int, tree: Path = HERE) -> list[Run]:
    """Every run, rounds after rounds: what the machine does meanwhile falls on all benchmarks.

    Each round trains in a folder of its own, or the second would find the first one's models.
    """
    if repeat == 1:
        return [Run(each, folder / f"{each.name}.json", folder, tree) for each in benchmarks]
    return [
        Run(each, folder / f"{each.name}.{number}.json", folder / str(number), tree)
        for number in range(1, repeat + 1)
        for each in benchmarks
    ]


def in_turns(old: Sequence[Run], new: Sequence[Run]) -> list[Run]:
    """Each run beside its like of the other commit; which of them goes first changes from round to round."""
    like = {run.path.name: run for run in old}
    rounds, found = Counter[str](), list[Run]()
    for run in new:
        pair = [like[run.path.name], run] if run.path.name in like else [run]
        rounds[run.benchmark.name] += 1
        found += pair if rounds[run.benchmark.name] % 2 else reversed(pair)
    return found


def run_all(runs: Sequence[Run], size: Size) -> list[Run]:
    """Run them one after the other; those that failed."""
    failed, expected, start = [], 0.0, time.monotonic()
    for number, run in enumerate(runs):
        minutes = remaining(runs[number:], size, expected=expected, taken=(time.monotonic() - start) / 60)
        log.info("%d/%d %s, ETA %.0f min", number + 1, len(runs), run.path.stem, minutes)
        if not measure(run, size):
            failed.append(run)
        expected += run.benchmark.about(size)
    return failed


def remaining(runs: Sequence[Run], size: Size, *, expected: float, taken: float) -> float:
    """Minutes that are left: what the table says, times how much longer this machine took so far."""
    return sum(run.benchmark.about(size) for run in runs) * (taken / expected if expected else 1.0)


def measure(run: Run, size: Size) -> bool:
    """Run one benchmark; its result appears only when it has ended well, whole."""
    unfinished, start, status = run.path.with_suffix(".unfinished").resolve(), time.monotonic(), 0
    run.folder.mkdir(parents=True, exist_ok=True)
    deadline = start + PATIENCE * 60 * max(run.benchmark.about(size), 5)
    with log_of(run).open("w", encoding="utf-8") as spoken:
        for command in commands(run.benchmark, unfinished, run.folder.resolve(), size):
            status = status or ended(command, spoken, deadline, tree=run.tree)
    minutes = (time.monotonic() - start) / 60
    if status == 0 and unfinished.exists():
        unfinished.replace(run.path)
        log.info("%s: %.1f min", run.path.stem, minutes)
        return True
    what = f"ended as hung after {minutes:.0f} min" if status == HUNG else f"exit status {status}"
    last = log_of(run).read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
    log.error("%s: %s, %s\n%s", run.path.stem, what, log_of(run), "\n".join(last))
    return False


def commands(benchmark: Benchmark, result: Path, folder: Path, size: Size) -> list[list[str]]:
    """What comes before a benchmark, and the benchmark."""
    before, words = (
        shlex.split(text.format(folder=folder, scratch=BUILD / f"shared-{size}"))
        for text in (benchmark.before, benchmark.arguments(size))
    )
    own = [sys.executable, "-m", f"benchmarks.{benchmark.name}", "--json", str(result), *words]
    return [[sys.executable, "-m", "scalingnote.cli", *before], own] if before else [own]


def ended(command: Sequence[str], spoken: IO[str], deadline: float, *, tree: Path) -> int:
    """The exit status of a command, or HUNG; nothing that it started is left behind."""
    process = subprocess.Popen(
        command,
        stdout=spoken,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},  # before what is installed; in Ray's workers, too
    )
    try:
        return process.wait(timeout=max(deadline - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
        return HUNG
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a benchmark and of what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def log_of(run: Run) -> Path:
    """Where a run's output lies."""
    return run.path.with_suffix(".log")


def missing(benchmark: Benchmark) -> str:
    """What this machine lacks for a benchmark; empty: nothing."""
    return "needs an NVIDIA GPU" if benchmark.needs_gpu and shutil.which("nvidia-smi") is None else ""


def commit() -> str:
    """What the code is called: `git describe`, and a hash of what was changed since; documents aside."""
    code = (".", ":!docs", ":!*.md")
    name = _git("describe", "--always").strip()
    changed = _git("diff", "HEAD", "--", *code).encode()
    for path in _git("ls-files", "--others", "--exclude-standard", "-z", "--", *code).split("\0")[:-1]:
        changed += path.encode() + (HERE / path).read_bytes()
    return f"{name}-dirty-{hashlib.sha256(changed).hexdigest()[:8]}" if changed else name


def checkout(name: str) -> Path:
    """The files of a commit, beside the results; what this checkout has of it stays as it is."""
    tree = HERE / BUILD / "trees" / _git("rev-parse", "--short", f"{name}^{{commit}}").strip()
    if not tree.exists():
        _git("worktree", "add", "--force", "--detach", str(tree), name)
    return tree


def keep(runs: Sequence[Run]) -> None:
    """Copy results (of several rounds the first) and plots to docs/results; add trials to those there."""
    firsts: dict[str, Run] = {}
    for run in runs:
        if run.path.exists():
            firsts.setdefault(run.benchmark.name, run)
    for name, run in firsts.items():
        shutil.copyfile(run.path, RESULTS / f"{name}.json")
        named = re.findall(r"\{folder\}/(\S+\.png)", run.benchmark.full)
        for plot in (*(run.folder / plot for plot in named), *run.folder.glob(f"{name}_*.png")):
            shutil.copyfile(plot, RESULTS / plot.name)
        if "{folder}/trials.jsonl" in run.benchmark.full:
            trials.add(run.folder / "trials.jsonl", RESULTS / "trials.jsonl")


def _folder(name: str, size: Size) -> Path:
    folder = BUILD / (name + ("-full" if size == "full" else ""))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=HERE, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        asked = " ".join(["git", *words])
        raise SystemExit(
            f"results are stored by commit: run this in a git checkout ({asked}: {said})"
        ) from error
    return done.stdout


if __name__ == "__main__":
    main()
