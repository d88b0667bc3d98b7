"""Runs of the first commands of the README with the wheel, in a folder without a checkout.

    python tests/readme_check.py             packages that are already installed here are not installed again
    python tests/readme_check.py --clean     all packages are installed, as by a user: some GB of downloads

The wheel of this checkout replaces the clone. The commands read `docs.jsonl`, which the first cells of
examples/your_model.ipynb write. Then the first Python block runs. If a command starts a server, its health is
checked, and it is stopped.
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
START_S = 180.0  # until a server responds
END_S = 60.0


def first_blocks(readme: str) -> tuple[list[str], str]:
    """Return the commands of the first shell block, and the first Python block."""
    shell, python = (re.findall(rf"```{kind}\n(.*?)```", readme, re.S)[0] for kind in ("bash", "python"))
    commands = [shlex.join(shlex.split(line, comments=True)) for line in shell.splitlines()]
    return [command for command in commands if command], python


def write_documents(folder: Path) -> None:
    """Write the documents of the notebook to `docs.jsonl`."""
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
    """Start a server, wait until it is healthy, and stop it."""
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
    """Check this README; return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--clean", action="store_true", help="install all packages, also those that are installed here"
    )
    arguments = parser.parse_args()
    (install, *commands), python = first_blocks((ROOT / "README.md").read_text())
    with tempfile.TemporaryDirectory(prefix="readme-") as name:
        folder, venv = Path(name).resolve(), Path(name).resolve() / "environment"
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
        subprocess.run(wheel, check=True)
        (wheel_file,) = folder.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        if not arguments.clean:  # packages of this interpreter are found after those of the environment
            (site,) = venv.glob("lib/python*/site-packages")
            (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = {**variables, "PATH": f"{venv}/bin{os.pathsep}{variables['PATH']}"}
        extras = re.findall(r"\.(\[[\w,]+\])", install)
        install = install.replace(f"-e '.{extras[0]}'", shlex.quote(f"{wheel_file}{extras[0]}"))
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
