"""The check of the Dockerfile finds the errors that a builder finds."""

from pathlib import Path

import pytest

import gpu_versions
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


def test_stages_mounts_and_variables_work_as_in_an_image(project: Path, tmp_path: Path):
    checked = check(
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
    assert len(checked.stages) == 2


def test_build_arguments_are_set(project: Path, tmp_path: Path):
    (project / "Dockerfile").write_text(
        "FROM base\nARG EXTRAS=cpu\nARG OTHER=kept\nRUN echo ${EXTRAS} ${OTHER} > /found\n"
    )
    (tmp_path / "work").mkdir()
    checked = image_check.check(project, tmp_path / "work", given={"EXTRAS": "gpu"})
    assert (tmp_path / "work" / "stage-0" / "found").read_text() == "gpu kept\n"
    # Packages of such an image are only resolved: machines of test runs have no GPU.
    assert "uv" in (tmp_path / "work" / "stage-0" / "python" / "bin" / "pip").read_text()
    assert checked.given == {"EXTRAS": "gpu"}


def test_gpu_images_have_the_pinned_versions():
    """Only the packages in DIFFERENT may differ, so that the tests on CPUs use the same versions."""
    pinned = versions(gpu_versions.ROOT / "constraints.txt")
    for variant, different in gpu_versions.DIFFERENT.items():
        variant_versions = versions(gpu_versions.constraints(variant))
        common = variant_versions.keys() & pinned.keys()
        others = {name for name in common if variant_versions[name] != pinned[name]}
        assert others == set(different)
        assert {"torch", "faiss-gpu", "nvidia-nccl-cu13"} <= set(variant_versions)
        assert variant_versions["cuda-toolkit"].startswith("13.0.")


def versions(file: Path) -> dict[str, str]:
    pins = (line.partition("==") for line in file.read_text().splitlines() if "==" in line)
    return {name.lower().replace("_", "-"): version for name, _, version in pins}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("RUN false", "exit code 1"),
        ("COPY secret /app/", "no secret in the build context"),
        ("COPY --chown=ray data /app", "ray is not a number"),
        ("USER ray", "ray is not a number"),
        ("RUN --mount=type=bind,source=missing,target=/x true", "no missing there"),
        ("HEALTHCHECK NONE", "extend this check"),
    ],
)
def test_a_wrong_line_is_an_error(line: str, message: str, project: Path, tmp_path: Path):
    with pytest.raises(CheckError, match=message):
        check(project, tmp_path / "work", HEAD + line + "\n")
