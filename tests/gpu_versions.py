"""The packages of the GPU images, resolved and not installed: on machines without a GPU, in seconds.

    python tests/gpu_versions.py            whether the package index has what constraints-*.txt name
    python tests/gpu_versions.py --write    write these files anew, from constraints.txt

uv reads the packages' metadata alone, CUDA's own among them, and chooses versions as pip would. What vLLM
demands in other versions than constraints.txt has is left out of that (DIFFERENT) and chosen anew.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "onnx,redis,rerank"  # beside these, as the Dockerfile says
EXTRAS = {"gpu": f"gpu,{IMAGE}", "vllm": f"gpu,vllm,{IMAGE}"}
DIFFERENT = {"gpu": (), "vllm": ("fastapi", "llvmlite", "numba", "numpy")}
HEAD = "# Versions of the image with the extras {extras}, for CUDA 13.0; written by `make lock`.\n"


def constraints(variant: str) -> Path:
    """The file with the versions of a variant."""
    return ROOT / f"constraints-{variant}.txt"


def resolve(variant: str, pins: Path) -> tuple[str, str]:
    """Versions of all packages of a variant, a line each, and what is wrong if there are none."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.in")
        wanted.write_text(f"scalingnote[{EXTRAS[variant]}] @ {ROOT.as_uri()}\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += ["--python", sys.executable, "--no-config", "-c", str(pins), str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if "==" in line]
    return "".join(f"{line}\n" for line in found), done.stderr.strip() if done.returncode else ""


def problem(variant: str) -> str:
    """Why the versions of a variant cannot be installed; empty if they can."""
    return resolve(variant, constraints(variant))[1]


def write(variant: str) -> str:
    """Choose the versions of a variant anew; returns what is wrong if there are none."""
    names = "|".join(DIFFERENT[variant])
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in pinned if not (names and re.match(rf"({names})==", line))]
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text("\n".join(kept), encoding="utf-8")
        found, wrong = resolve(variant, pins)
    if not wrong:
        constraints(variant).write_text(HEAD.format(extras=EXTRAS[variant]) + found, encoding="utf-8")
    return wrong


def main() -> int:
    """Check or write the files; returns an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write both files anew")
    parser.add_argument("--variant", choices=list(EXTRAS), help="this one alone")
    options = parser.parse_args()
    run = write if options.write else problem
    variants = [options.variant] if options.variant else list(EXTRAS)
    wrong = {variant: text for variant in variants if (text := run(variant))}
    for variant, text in wrong.items():
        print(f"{constraints(variant).name}: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
