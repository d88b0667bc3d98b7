"""Links of the documentation have targets; its commands, configs and imports exist."""

import argparse
import ast
import importlib
import re
import shlex
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from scalingnote.cli import main as cli
from scalingnote.core.config import load, validate
from scalingnote.run import stages
from scalingnote.run.config import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GUIDES = sorted([ROOT / "docs/start.md", *ROOT.glob("docs/guides/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """Return the text without fenced blocks and code spans: their brackets are not links."""
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]+`(?!\])", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from headings."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path):
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page}: {link}"


def blocks(page: Path, *languages: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", text, flags=re.M | re.S)
    return [textwrap.dedent(block) for _, language, block in fences if language in languages]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_commands_have_arguments_that_exist(page: Path, capsys: pytest.CaptureFixture[str]):
    parser = cli._parser()
    for block in blocks(page, "bash", "sh", ""):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if "scalingnote " in line else []
            if words[:1] == ["scalingnote"] and "..." not in words and "…" not in line:
                parser.parse_args(words[1:])
    capsys.readouterr()


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.stem)
def test_options_that_the_text_names_are_those_of_the_command(page: Path):
    """Also if dots shorten a command, or for an option without a command, which may belong to any command."""
    (commands,) = (each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction))
    options = {name: {*parser.complete()._option_string_actions} for name, parser in commands.choices.items()}
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(blocks(page, "bash", "sh", "")).replace("\\\n", " ").splitlines()
    for code in (*re.findall(r"`([^`\n]+)`", text), *lines):
        used_options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code))
        if command := re.match(r"(?:\$ )?scalingnote ([a-z_]+)", code):
            assert used_options <= options[command[1]], code
        elif code.startswith("--"):
            assert used_options <= set().union(*options.values()), code


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_configs_are_valid(page: Path):
    for block in blocks(page, "yaml"):
        values = yaml.safe_load(block)
        values.pop("extends", None)
        if values.keys() <= RunConfig.model_fields.keys():
            validate(RunConfig, {"dataset": {"name": "python_docs"}, **values}, source=f"{page}:\n{block}")


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_python_imports_what_exists(page: Path):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("scalingnote."):
                if node.module == "scalingnote.evaluate.mteb_model" and find_spec("mteb") is None:
                    continue
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), block


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_modules_named_in_the_text_exist(name: str):
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
    modules = re.findall(r"`(\w+/[\w/]+\.py)`", text)
    assert len(modules) > 5
    for module in modules:
        assert (ROOT / module).exists() or (ROOT / "scalingnote" / module).exists(), module


def test_the_table_of_packages_is_complete():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| package \|.*?\n\n", text, flags=re.M | re.S)
    table_names = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.M))))
    package = ROOT / "scalingnote"
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert table_names == packages | modules


def test_the_example_script_runs_all_stages_in_order():
    script = (ROOT / "examples/scalingnote.sh").read_text(encoding="utf-8")
    config = load(RunConfig, [ROOT / "configs/quickstart/python_docs.yaml"])
    script = script.replace("$CONFIG", "my.yaml").replace("$SET", "").replace("$RUN", "runs/mine")
    parser, run_stages = cli._parser(), []
    for line in re.findall(r"^scalingnote .*$", script, flags=re.M):
        words = shlex.split(line)[1:]
        options = parser.parse_args(words)
        if words[0] == "run":
            choice = {"only": options.only, "start": options.start, "until": options.until}
            run_stages += [stage.name for stage in stages.select(config, **choice)]
    assert run_stages == [stage.name for stage in stages.of(config)]
