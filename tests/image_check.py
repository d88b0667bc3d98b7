"""The lines of the Dockerfile, run in a clean directory: for machines that cannot build an image.

    python tests/image_check.py             packages that are already installed here are not installed again
    python tests/image_check.py --clean     all packages are installed, as in the image: some GB of downloads
    python tests/image_check.py --variant gpu      packages are resolved, not installed; also with vllm

Every stage has a folder instead of the image's root. COPY and RUN --mount=type=bind can read the files that
.dockerignore includes. Absolute paths of the image are replaced by paths in that folder. RUN has a virtual
environment instead of the base image's Python, a separate home, and the ARG and ENV values before it. USER
and --chown must be numbers; they are not applied. In the end the entrypoints are started from WORKDIR. The
base image is not checked. Of an image with GPU packages every line runs, except that pip does not install:
uv resolves the packages in the package index.
"""

import argparse
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpu_versions import EXTRAS, ROOT, constraints

SYSTEM = "bin|dev|etc|lib|lib64|opt|proc|run|sbin|sys|usr|var"  # folders of the machine that stay as they are
PASSED = ("PATH", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")  # of the environment, and PIP_*
PIP = """#!/bin/sh
python="$(dirname "$0")/python"
{resolve}exec "$python" -m pip "$@"
"""
RESOLVE = """if [ "$1" = install ]; then
    exec "$python" -m uv "pip" "$@" --dry-run --quiet --no-config --python "$python"
fi
"""


class CheckError(Exception):
    """A line of the Dockerfile that is wrong or fails."""


@dataclass
class Stage:
    """A stage: the folder instead of its root, its variables and its working directory."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    place: str = "/"

    def path(self, inside: str) -> Path:
        """Return the path on this machine of a path of the image, absolute or relative to WORKDIR."""
        return self.root / os.path.join(self.place, inside).lstrip("/")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile with their arguments; continued lines are joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def options(rest: str) -> tuple[dict[str, list[str]], str]:
    """Split an instruction into its leading ``--name=value`` options and the rest."""
    leading: dict[str, list[str]] = {}
    while match := re.match(r"--(\w+)=(\S+)\s+", rest):
        leading.setdefault(match[1], []).append(match[2])
        rest = rest[match.end() :]
    return leading, rest


def context(source: Path, target: Path) -> Path:
    """Copy the build context: all files that .dockerignore includes, tracked or not."""
    rules = [
        line
        for line in (source / ".dockerignore").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    for folder, folders, files in os.walk(source):
        here = Path(folder).relative_to(source)
        folders[:] = [name for name in folders if not _is_ignored(here / name, rules)]
        for name in files:
            if not _is_ignored(here / name, rules):
                (target / here).mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(folder, name), target / here / name)
    return target


def _is_ignored(path: Path, rules: list[str]) -> bool:
    """Return whether the last rule that matches a path, or a folder above it, excludes it."""
    above = [str(path), *map(str, path.parents)][:-1]
    ignored = False
    for rule in rules:
        pattern = rule.removeprefix("!").removeprefix("**/")
        names = [Path(name).name for name in above] if "**/" in rule else above
        if any(fnmatch.fnmatch(name, pattern) for name in names):
            ignored = not rule.startswith("!")
    return ignored


class Check:
    """A run of the lines of a Dockerfile."""

    def __init__(self, source: Path, work: Path, *, clean: bool, given: Mapping[str, str]) -> None:
        """`given` are build arguments; with any, packages are resolved and not installed."""
        self.work, self.clean, self.given = work, clean, given
        self.context = context(source, work / "context")
        self.stages: dict[str, Stage] = {}
        self.globals: dict[str, str] = {}
        self.stage: Stage | None = None

    def run(self, name: str, rest: str) -> None:
        """Run one instruction; CheckError if it is wrong or fails."""
        instruction_names = {"ARG", "FROM", "COPY", "RUN", "ENV", "WORKDIR", "USER"}
        if name not in instruction_names:
            raise CheckError(
                f"{name} is not one of {', '.join(sorted(instruction_names))}: extend this check to run it"
            )
        if name != "ARG" and name != "FROM" and self.stage is None:
            raise CheckError(f"{name} before FROM")
        getattr(self, f"_{name.lower()}")(rest)

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        value = self.given.get(name, value)
        if self.stage is None:
            self.globals[name] = value
        else:
            self.stage.variables[name] = value or self.globals.get(name, "")

    def _env(self, rest: str) -> None:
        for pair in shlex.split(rest):
            name, _, value = pair.partition("=")
            self._now.variables[name] = value

    def _from(self, rest: str) -> None:
        base, _, alias = rest.partition(" AS ")
        base = re.sub(r"\$\{?(\w+)\}?", lambda match: self.globals[match[1]], base)
        print(f"  base image {base}: not checked", flush=True)
        self.stage = Stage(self.work / f"stage-{len(self.stages)}")
        self.stages[alias.strip() or str(len(self.stages))] = self.stage
        for folder in ("tmp", "home"):
            (self.stage.root / folder).mkdir(parents=True)

    def _copy(self, rest: str) -> None:
        copy_options, rest = options(rest)
        self._check_owner(copy_options.pop("chown", ["0:0"])[0])
        origin = self.stages[copy_options.pop("from")[0]].root if "from" in copy_options else self.context
        if copy_options:
            raise CheckError(f"COPY {rest}: unknown options {', '.join(copy_options)}")
        *sources, target = shlex.split(rest)
        into = self._now.path(target)
        for source in sources:
            source_path = origin / source.lstrip("/")
            if not source_path.exists():
                raise CheckError(f"COPY {rest}: no {source} in the build context, see .dockerignore")
            if source_path.is_dir():
                shutil.copytree(source_path, into, dirs_exist_ok=True)
            else:
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source_path, into)

    def _workdir(self, rest: str) -> None:
        self._now.place = os.path.join(self._now.place, rest)
        self._now.path(".").mkdir(parents=True, exist_ok=True)

    def _user(self, rest: str) -> None:
        self._check_owner(f"{rest}:0")

    def _run(self, rest: str) -> None:
        run_options, command = options(rest)
        links = [self._mount(mount) for mount in run_options.pop("mount", [])]
        if run_options:
            raise CheckError(f"RUN {command}: unknown options {', '.join(run_options)}")
        try:
            self.shell(command)
        finally:
            for link in links:
                link.unlink()

    def _mount(self, text: str) -> Path:
        mount = dict(part.split("=", 1) for part in text.split(","))
        if mount.get("type") != "bind":
            raise CheckError(f"--mount={text}: only binds are run here")
        origin = self.stages[mount["from"]].root if "from" in mount else self.context
        source_path, link = origin / mount["source"].lstrip("/"), self._now.path(mount["target"])
        if not source_path.exists():
            raise CheckError(f"--mount={text}: no {mount['source']} there")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source_path)
        return link

    def shell(self, command: str) -> None:
        """Run a command of the image in the current stage; CheckError if it fails."""
        stage = self._now
        self._install_python(stage.root / "python")
        absolute = re.compile(rf"(?<![\w./:$}}])/(?!(?:{SYSTEM})\b)(?=\w)")
        inside = absolute.sub(f"{stage.root}/", command)
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment["PIP_QUIET"] = "1"
        environment["PATH"] = f"{stage.root}/python/bin{os.pathsep}{environment['PATH']}"
        home = {"HOME": f"{stage.root}/home", "TMPDIR": f"{stage.root}/tmp", "PYTHONNOUSERSITE": "1"}
        process = subprocess.run(
            ["bash", "-ec", inside],
            cwd=stage.path("."),
            env=environment | home | stage.variables,
            check=False,
        )
        if process.returncode:
            raise CheckError(f"RUN {command}: exit code {process.returncode}")

    def _install_python(self, environment: Path) -> None:
        if environment.exists():
            return
        pip = [] if self.clean else ["--without-pip"]
        subprocess.run([sys.executable, "-m", "venv", *pip, environment], check=True)
        if not self.clean:  # packages of this interpreter, including pip, are found after the environment's
            (site,) = environment.glob("lib/python*/site-packages")
            (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
            command = environment / "bin" / "pip"
            command.write_text(PIP.format(resolve=RESOLVE if self.given else ""))
            command.chmod(0o755)

    def _check_owner(self, owner: str) -> None:
        if not re.fullmatch(r"\d+:\d+", owner):
            raise CheckError(
                f"{owner.removesuffix(':0')} is not a number: Kubernetes cannot check that it is not root"
            )

    @property
    def _now(self) -> Stage:
        assert self.stage is not None
        return self.stage


def check(source: Path, work: Path, *, clean: bool = False, given: Mapping[str, str] | None = None) -> Check:
    """Run the lines of ``source/Dockerfile`` below `work`; CheckError at the first line that fails."""
    dockerfile_check = Check(source, work, clean=clean, given=given or {})
    for name, rest in instructions((source / "Dockerfile").read_text()):
        print(f"{name} {rest}", flush=True)
        dockerfile_check.run(name, rest)
    return dockerfile_check


def main() -> int:
    """Check this project's Dockerfile; return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--clean", action="store_true", help="install all packages, also those that are installed here"
    )
    parser.add_argument("--variant", choices=list(EXTRAS), help="an image with GPU packages")
    arguments = parser.parse_args()
    build_arguments = {}
    if variant := arguments.variant:
        build_arguments = {"EXTRAS": EXTRAS[variant], "CONSTRAINTS": constraints(variant).name}
    with tempfile.TemporaryDirectory(prefix="image-") as name:
        try:
            dockerfile_check = check(ROOT, Path(name).resolve(), clean=arguments.clean, given=build_arguments)
            if build_arguments:
                print(f"every line of the Dockerfile runs, and the packages of {variant} resolve")
                return 0
            # The installed package, and not this checkout, with the jobs and configs that were copied.
            dockerfile_check.shell(
                'python -c "import scalingnote; print(scalingnote.__file__)" | grep -q /python/lib'
            )
            dockerfile_check.shell(
                "for name in train run ingest; do python jobs/$name.py --help > /dev/null; done"
            )
            dockerfile_check.shell("scalingnote --help > /dev/null")
        except CheckError as error:
            print(f"Dockerfile: {error}", file=sys.stderr)
            return 1
    print("every line of the Dockerfile runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
