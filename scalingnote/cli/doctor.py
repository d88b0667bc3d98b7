"""`scalingnote doctor`: checks of the machine and the installation, with a remedy for each problem."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from scalingnote.core import GIB

PYTHON = (3, 11)
EXTRAS = ("common", "offline", "online")  # of `scalingnote[cpu]`, in addition to the core


Level = Literal["ok", "warn", "stops"]


@dataclass(frozen=True)
class Finding:
    """Result of one check; `stops` means that a run cannot work before the remedy is applied."""

    subject: str
    level: Level
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run all checks, in the order in which a new user meets their subjects."""
    checks = (
        _machine(),
        _python(),
        _packages(),
        _ray(),
        _clusters(),
        _accelerators(),
        _engines(),
        _memory(),
        _disk(Path.cwd()),
    )
    return [finding for check in checks for finding in check]


def as_json(findings: list[Finding]) -> str:
    """Format the findings as JSON."""
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def as_text(findings: list[Finding]) -> str:
    """Format the findings as text: one line each, and a line with the remedy if there is one."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<5}  {finding.subject:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<5}  {'':<{width}}  -> {finding.remedy}")
    stops = sum(finding.level == "stops" for finding in findings)
    lines.append(f"\n{stops} findings stop a run" if stops else "\nready to run")
    return "\n".join(lines)


def _grade(subject: str, state: str, *problems: tuple[bool, Level, str]) -> Finding:
    """Return a finding with level and remedy of the first problem that occurs, else with level "ok"."""
    for there, level, remedy in problems:
        if there:
            return Finding(subject, level, state, remedy)
    return Finding(subject, "ok", state)


def _machine() -> Iterator[Finding]:
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    memory = psutil.virtual_memory().total / GIB
    state = f"{platform.system()} {platform.machine()}, {cores} cores, {memory:.1f} GB"
    is_windows = platform.system() == "Windows"
    yield _grade("machine", state, (is_windows, "warn", "Ray supports Windows only partly: use WSL 2"))


def _python() -> Iterator[Finding]:
    is_old = tuple(map(int, platform.python_version_tuple()[:2])) < PYTHON
    remedy = f"install Python {PYTHON[0]}.{PYTHON[1]} or newer"
    yield _grade("python", platform.python_version(), (is_old, "stops", remedy))


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    problems = []
    try:
        lines = importlib.metadata.requires("scalingnote") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "stops", "scalingnote itself is not installed", "pip install '.[cpu]'")
        return
    requirements = [r for r in map(Requirement, lines) if r.name != "scalingnote"]
    needed = {extra: [r for r in requirements if _is_needed(r, extra)] for extra in ("", *EXTRAS)}
    missing = [] if importlib.util.find_spec("faiss") else ["faiss"]
    for extra, group in needed.items():
        for requirement in group:
            name, remedy = requirement.name, f"pip install '{requirement.name}{requirement.specifier}'"
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                if extra:
                    missing.append(name)
                else:
                    problems.append((f"{name} is missing", remedy))
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                problems.append((f"{name} is {version}, required {requirement.specifier}", remedy))
    if missing:
        state = f"only queries can be encoded: {', '.join(sorted(set(missing)))} missing"
        problems.append(
            (state, "pip install 'scalingnote[cpu]' (or [gpu]; only [train] or [serve] for a part)")
        )
    for state, remedy in problems:
        yield Finding("packages", "stops", state, remedy)
    if not problems:
        yield Finding("packages", "ok", f"{sum(map(len, needed.values()))} requirements and faiss are met")


def _is_needed(requirement: Any, extra: str) -> bool:
    """Return whether this extra, or the core for "", has the requirement."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return not extra
    return bool(requirement.marker.evaluate({"extra": extra}))


def _ray() -> Iterator[Finding]:
    if importlib.util.find_spec("ray") is None:
        return  # _packages reports it
    try:
        ray = importlib.import_module("ray")
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        remedy = "reinstall it: pip install --force-reinstall ray"
        yield Finding("ray", "stops", f"cannot be imported: {error}", remedy)
        return
    programs = Path(str(ray.__file__)).parent / "core" / "src" / "ray"
    for program in (programs / "raylet" / "raylet", programs / "gcs" / "gcs_server"):
        if not os.access(program, os.X_OK):
            yield Finding("ray", "stops", f"{program} cannot be executed", "reinstall Ray for this platform")
            return
    yield Finding("ray", "ok", str(ray.__version__))


def _clusters() -> Iterator[Finding]:
    address = os.environ.get("RAY_ADDRESS")
    if address:
        remedy = "runs join this cluster; `unset RAY_ADDRESS` for a private local one"
        yield Finding("RAY_ADDRESS", "warn", address, remedy)
        if not _has_token():
            yield Finding(
                "RAY_AUTH_MODE",
                "warn",
                f"no token for the cluster at {address}",
                "any client of a cluster without token authentication can run code on it: start its nodes "
                "and this shell with RAY_AUTH_MODE=token (docs/guides/operations.md, Tokens)",
            )
    processes = (process.info for process in psutil.process_iter(["pid", "name"]))
    running = [info["pid"] for info in processes if str(info["name"]).startswith("gcs_server")]
    if running:
        yield Finding(
            "clusters",
            "warn",
            f"{len(running)} Ray cluster(s) on this machine (gcs_server {', '.join(map(str, running[:4]))})",
            "runs start a separate one; if one is left over from a crash, `ray stop` frees its memory",
        )


def _has_token() -> bool:
    """Return whether this process would send a token to the cluster that it joins."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return False
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    files = [Path(path)] if path else [Path.home() / ".ray" / "auth_token"]
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or any(file.is_file() for file in files)


def _accelerators() -> Iterator[Finding]:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return  # _packages reports it
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        yield Finding("gpu", "ok", "none: everything runs on the CPU")
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        yield _grade(
            "gpu",
            f"{facts.name}, {free / GIB:.0f} of {total / GIB:.0f} GB free",
            (free < total / 2, "warn", "another process uses it: see nvidia-smi"),
            (True, "ok", "use it with --set train.resources.gpus_per_worker=1 (encode, distill...)"),
        )

    yield _precision(torch, "cuda" if has_gpu else "cpu")


def _precision(torch: Any, device: str) -> Finding:
    """Measure the speed of bfloat16: CPUs without AMX or AVX512-BF16 emulate it slowly."""
    seconds = {}
    for name in ("float32", "bfloat16"):
        matrix = torch.ones(512, 512, dtype=getattr(torch, name), device=device)
        best = float("inf")
        for _ in range(4):  # the first one warms up
            start = time.perf_counter()
            (matrix @ matrix).sum().item()  # .item() waits for the device
            best = min(best, time.perf_counter() - start)
        seconds[name] = best
    ratio = seconds["float32"] / seconds["bfloat16"]
    speed = f"{ratio:.2g} times the speed of float32 on {device} (512 x 512 matmul)"
    return _grade("bfloat16", speed, (ratio < 1, "ok", "keep float32 here"))


def _engines() -> Iterator[Finding]:
    from scalingnote.encode.engines import MODULES  # late: doctor must run if packages are missing

    modules = {name: importlib.util.find_spec(module) is not None for name, module in MODULES.items()}
    states = [f"{name} {'is' if there else 'is not'} installed" for name, there in modules.items()]
    yield Finding("encode.engine", "ok", ", ".join(["own", *states]))


def _memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available / GIB
    few = "lower --set train.resources.workers=1 and encode.resources.workers=1"
    yield _grade(
        "memory",
        f"{free:.1f} GB free",
        (free < 1.5, "stops", "Ray itself needs 1.5 GB: end other programs"),
        (free < 6, "warn", few),
    )
    shared = Path("/dev/shm")
    if shared.exists() and (size := shutil.disk_usage(shared).total / GIB) < 1:
        remedy = "Ray falls back to disk: start the container with --shm-size=4g"
        yield Finding("/dev/shm", "warn", f"{size:.2f} GB", remedy)


def _disk(directory: Path) -> Iterator[Finding]:
    if not os.access(directory, os.W_OK):
        yield Finding("disk", "stops", f"{directory} is read-only", "run from a directory you may write to")
        return
    for subject, place in (("disk", directory), ("ray's disk", Path(os.environ.get("RAY_TMPDIR", "/tmp")))):
        if not place.exists():
            continue
        usage = shutil.disk_usage(place)
        little = usage.free < 5 * GIB or usage.free < 0.05 * usage.total
        yield _grade(
            subject,
            f"{usage.free / GIB:.1f} GB free in {place}",
            (usage.free < GIB, "stops", "free some, or set another place with --set run_dir=..."),
            (little, "warn", "Ray stops spilling when a disk is 95 % full: free some"),
        )
