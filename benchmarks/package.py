"""The installed package: seconds until the first help, seconds and megabytes of every install.

    python -m benchmarks.package --json docs/results/package.json
    python -m benchmarks.package --extras train serve cpu quickstart     # some GB from the package index


- help_s: `scalingnote --help`, best of some rounds
- import_s: `from scalingnote import QueryEncoder` in a new process, including the start of Python
- python_s: a new process that does nothing, to subtract
- core_install_mb: `pip install WHEEL` without extras in a clean environment, without pip
- core_install_s: its time; wheels come from the package index or pip's cache
- wheel_mb: the wheel
- installs: the same for each extra of ``--extras``, in a separate environment, with its packages
"""

import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import arguments, show, write

ROOT = Path(__file__).parent.parent
SOURCES = ("scalingnote", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt")
NOT_OURS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "wheel")
MB = 10**6


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--extras", nargs="*", default=[], help="also install these, one after the other")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder) / "source")
        environment = Path(folder) / "environment"
        core = install(wheel, environment)
        metrics = measure(environment, core, rounds=options.rounds)
        metrics["wheel_mb"] = round(wheel.stat().st_size / MB, 2)
        installs = [core]
        for extra in options.extras:
            shutil.rmtree(environment)  # an extra may take some GB
            installs.append(install(wheel, environment, extra))
    show("Package", [metrics])
    show("Installs", installs)
    write(options.json, metrics=metrics, installs=installs)


def install(wheel: Path, environment: Path, extra: str = "") -> dict[str, str | float]:
    """Install a wheel in a clean environment; return its extra, number of packages, megabytes and seconds."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    start = time.perf_counter()
    pip = f"{python} -m pip install --quiet --disable-pip-version-check".split()
    requirement = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), requirement], check=True)
    seconds = time.perf_counter() - start
    return {
        "install": f"[{extra}]" if extra else "core",
        "packages": sum(not path.name.startswith(NOT_OURS) for path in packages.glob("*.dist-info")),
        "MB": round(installed_bytes(packages) / MB),
        "seconds": round(seconds),
    }


def measure(environment: Path, core: dict[str, str | float], *, rounds: int) -> dict[str, float]:
    """Time the installed core."""
    python = environment / "bin" / "python"
    return {
        "help_s": best_s([environment / "bin" / "scalingnote", "--help"], rounds),
        "import_s": best_s([python, "-c", "from scalingnote import QueryEncoder"], rounds),
        "python_s": best_s([python, "-c", "pass"], rounds),
        "core_install_mb": float(core["MB"]),
        "core_install_s": float(core["seconds"]),
    }


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout in a copy of its sources."""
    folder.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    (wheel,) = folder.glob("dist/*.whl")
    return wheel


def installed_bytes(packages: Path) -> int:
    """Count the bytes of files in site-packages, without the installer's."""
    names = [path for path in packages.iterdir() if not path.name.startswith(NOT_OURS)]
    files = [file for path in names for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file() and "__pycache__" not in file.parts)


def best_s(command: Sequence[str | Path], rounds: int) -> float:
    """Return the seconds of a command, the least of some rounds after one that reads the files from disk."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd="/")
        seconds.append(time.perf_counter() - start)
    return round(min(seconds[1:]), 3)


if __name__ == "__main__":
    main()
