"""The first commands of the README, run from the wheel where there is no checkout.

    python tests/readme_check.py             packages that are installed here already are not installed again
    python tests/readme_check.py --clean     all are, as on a user's machine: some GB from the package index

The wheel of this checkout takes the clone's place. The commands find `docs.jsonl`, which the first cells of
examples/your_model.ipynb write; then the first Python block runs. A server that a command starts is asked for
its health, and ended.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEALTH = "http://127.0.0.1:8000/healthz"
START_S = 180.0  # that a server has to answer
END_S = 60.0


def first_blocks(readme: str) -> tuple[list[str], str]:
    """The commands of the first shell block, and the first Python block."""
    shell, python = (re.findall(rf"```{kind}\n(.*?)```", readme, re.S)[0] for kind in ("bash", "python"))
    commands = [shlex.join(shlex.split(line, comments=True)) for line in shell.splitlines()]
    return [command for command in commands if command], python


def write_documents(folder: Path) -> None:
    """The documents of the notebook, as `docs.jsonl`."""
    cells = json.loads((ROOT / "examples" / "your_model.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    subprocess.run([sys.executable, "-c", "\n".join(code[:2])], cwd=folder, check=True)


def run(commands: Sequence[str], python: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run commands and the Python block in a folder; CalledProcessError at the first that fails."""
    for command in commands:
        print(f"$ {command}", flush=True)
        words = shlex.split(command)
        if words[:2] == ["scalingnote", "serve"]:
            _serve(words, folder, environment)
        else:
            subprocess.run(words, cwd=folder, env=environment, check=True)
    print("$ python", flush=True)
    subprocess.run(["python", "-c", python], cwd=folder, env=environment, check=True)


def _serve(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Start a server, wait until it answers, and end it."""
    server = subprocess.Popen(words, cwd=folder, env=environment)
    try:
        end = time.monotonic() + START_S
        while not _is_healthy():
            if server.poll() is not None or time.monotonic() > end:
                raise subprocess.CalledProcessError(server.poll() or -1, words)
            time.sleep(0.5)
    finally:
        server.terminate()
        server.wait(END_S)


def _is_healthy() -> bool:
    try:
        with urllib.request.urlopen(HEALTH, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    """Check this README; returns an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clean", action="store_true", help="install everything, also what is here already")
    arguments = parser.parse_args()
    (install, *commands), python = first_blocks((ROOT / "README.md").read_text())
    with tempfile.TemporaryDirectory(prefix="readme-") as name:
        folder, venv = Path(name).resolve(), Path(name).resolve() / "environment"
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
        subprocess.run(wheel, check=True)
        (built,) = folder.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        if not arguments.clean:  # packages of this interpreter are found behind those of the environment
            (site,) = venv.glob("lib/python*/site-packages")
            (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = {**kept, "PATH": f"{venv}/bin{os.pathsep}{kept['PATH']}"}
        extras = re.findall(r"\.(\[[\w,]+\])", install)
        install = install.replace(f"-e '.{extras[0]}'", shlex.quote(f"{built}{extras[0]}"))
        install = install.replace("constraints.txt", str(ROOT / "constraints.txt"))
        write_documents(folder)
        try:
            run([install, *commands], python, folder, environment)
        except subprocess.CalledProcessError as error:
            print(
                f"README.md: {shlex.join(map(str, error.cmd))}: exit code {error.returncode}", file=sys.stderr
            )
            return 1
    print("the first blocks of the README run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
