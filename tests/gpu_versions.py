"""The packages of the GPU images, resolved and not installed: on machines without a GPU, in seconds.

    python tests/gpu_versions.py            check that the package index has the versions of constraints-*.txt
    python tests/gpu_versions.py --write    write these files again, from constraints.txt

uv reads only the metadata of packages, including those of CUDA, and chooses versions like pip. Packages that
vLLM needs in other versions than constraints.txt has (DIFFERENT) are left out of the constraints.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "onnx,redis,rerank"  # in addition to these, as in the Dockerfile
EXTRAS = {"gpu": f"gpu,{IMAGE}", "vllm": f"gpu,vllm,{IMAGE}"}
DIFFERENT = {"gpu": (), "vllm": ("fastapi", "llvmlite", "numba", "numpy")}
HEAD = "# Versions of the image with the extras {extras}, for CUDA 13.0; written by `make lock`.\n"


def constraints(variant: str) -> Path:
    """Return the file with the versions of a variant."""
    return ROOT / f"constraints-{variant}.txt"


def resolve(variant: str, pins: Path) -> tuple[str, str]:
    """Resolve all packages of a variant; return their versions, one per line, and the error, if any."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "wanted.in")
        requirements.write_text(f"scalingnote[{EXTRAS[variant]}] @ {ROOT.as_uri()}\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += ["--python", sys.executable, "--no-config", "-c", str(pins), str(requirements)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    versions = [line for line in process.stdout.splitlines() if "==" in line]
    return "".join(f"{line}\n" for line in versions), process.stderr.strip() if process.returncode else ""


def problem(variant: str) -> str:
    """Return why the versions of a variant cannot be installed; empty if they can."""
    return resolve(variant, constraints(variant))[1]


def write(variant: str) -> str:
    """Choose the versions of a variant again and write them; return the error if there is one."""
    names = "|".join(DIFFERENT[variant])
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins_kept = [line for line in pinned if not (names and re.match(rf"({names})==", line))]
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text("\n".join(pins_kept), encoding="utf-8")
        versions, error = resolve(variant, pins)
    if not error:
        constraints(variant).write_text(HEAD.format(extras=EXTRAS[variant]) + versions, encoding="utf-8")
    return error


def main() -> int:
    """Check or write the files; return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write both files again")
    parser.add_argument("--variant", choices=list(EXTRAS), help="only this one")
    options = parser.parse_args()
    run = write if options.write else problem
    variants = [options.variant] if options.variant else list(EXTRAS)
    errors = {variant: text for variant in variants if (text := run(variant))}
    for variant, text in errors.items():
        print(f"{constraints(variant).name}: {text}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
