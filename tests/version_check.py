"""Runs of the tests of models, packing and training with other versions of packages than the pinned ones.

    python tests/version_check.py torch==2.14.1
    python tests/version_check.py numpy==2.3.5 numba==0.65.0 llvmlite==0.47.0 fastapi==0.136.3

The packages are installed into a separate environment, which uses all other packages of this interpreter.
Missing dependencies are installed too (for a torch for GPUs: CUDA, gigabytes). This does not test kernels of
GPUs.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("models", "train", "encode", "quantize", "index", "search", "serve/test_api.py")
SHOWN = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]))"


def main() -> int:
    """Run the tests; return pytest's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="+", metavar="NAME==VERSION")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="below tests/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (site,) = Path(folder).glob("lib/python*/site-packages")
        (site / "here.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
        python = f"{folder}/bin/python"
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        # Not the constraints of this machine: other versions are the purpose.
        subprocess.run(
            [*install, *options.packages], check=True, env=os.environ | {"PIP_CONSTRAINT": os.devnull}
        )
        names = [package.partition("==")[0] for package in options.packages]
        subprocess.run([python, "-c", SHOWN, *names], check=True)
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow",
            *(f"tests/{name}" for name in options.tests),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
