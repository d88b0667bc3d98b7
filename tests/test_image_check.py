"""The check of the Dockerfile finds what a builder would find."""

from pathlib import Path

import pytest

import image_check
from image_check import CheckError

HEAD = "FROM base:${RAY} AS first\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "data" / "deep").mkdir(parents=True)
    (source / "secret").write_text("no")
    (source / "data" / "deep" / "a.txt").write_text("a")
    (source / "data" / "deep" / "a.pyc").write_text("no")
    (source / ".dockerignore").write_text("# all but\n*\n!data\n**/*.pyc\n")
    return source


def check(project: Path, work: Path, text: str) -> image_check.Check:
    (project / "Dockerfile").write_text("# syntax=x\nARG RAY=1.0\n" + text)
    work.mkdir()
    return image_check.check(project, work)


def test_stages_mounts_and_variables_are_as_in_an_image(project: Path, tmp_path: Path):
    made = check(
        project,
        tmp_path / "work",
        HEAD
        + """COPY --chown=1000:100 data /app/data
RUN cat /app/data/deep/*.txt > /tmp/out && \\
    test ! -e /app/data/deep/a.pyc
FROM base:${RAY}
ARG WORD=two
ENV MORE="three four"
RUN --mount=type=bind,from=first,source=/tmp/out,target=/tmp/in \\
    (cat /tmp/in && echo " ${WORD} ${MORE}") > /found
WORKDIR /app
USER 1000
RUN pwd > place && cat < /dev/null
""",
    )
    root = tmp_path / "work" / "stage-1"
    assert (root / "found").read_text() == "a two three four\n"
    assert (root / "app" / "place").read_text() == f"{root}/app\n"
    assert not (root / "tmp" / "in").exists()
    assert len(made.stages) == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("RUN false", "exit code 1"),
        ("COPY secret /app/", "no secret in the build context"),
        ("COPY --chown=ray data /app", "ray is no number"),
        ("USER ray", "ray is no number"),
        ("RUN --mount=type=bind,source=missing,target=/x true", "no missing there"),
        ("HEALTHCHECK NONE", "teach this check"),
    ],
)
def test_a_line_that_a_builder_refuses_is_told(line: str, told: str, project: Path, tmp_path: Path):
    with pytest.raises(CheckError, match=told):
        check(project, tmp_path / "work", HEAD + line + "\n")
