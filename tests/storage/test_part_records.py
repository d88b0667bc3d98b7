"""Records of parts: a stage that is killed goes on with the parts that have none."""

import json
from pathlib import Path

import pytest

from scalingnote.core.errors import PartsFailedError
from scalingnote.core.parts import PartStage, map_here
from scalingnote.storage.part_records import run_parts

PARTS = {f"rows/part-{number}": number for number in range(5)}


def run(folder: Path, stage: object, **options: object) -> tuple[dict[str, object], dict[str, str]]:
    return run_parts(
        stage, PARTS, folder=str(folder), executor=map_here, section="test", unit="parts", **options
    )


@pytest.mark.parametrize("loads", [True, False])
def test_a_killed_run_is_continued(tmp_path: Path, loads: bool) -> None:
    notes = tmp_path / "tried"

    def work(number: int) -> dict[str, int]:
        notes.write_text(notes.read_text() + f"{number} " if notes.exists() else f"{number} ")
        if number == 3 and notes.read_text().count("3") == 1:
            raise KeyboardInterrupt
        return {"square": number * number}

    stage = PartStage(lambda: work) if loads else work
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "done", stage)
    assert sorted(path.name for path in (tmp_path / "done").iterdir()) == [
        f"rows-part-{number}.json" for number in range(3)
    ]
    seen: list[object] = []
    records, failed = run(tmp_path / "done", stage, report=seen.append)
    assert records == {name: {"square": number**2} for name, number in PARTS.items()}
    assert failed == {}
    assert notes.read_text().split() == ["0", "1", "2", "3", "3", "4"]
    assert seen == [{"square": 9}, {"square": 16}]
    assert json.loads((tmp_path / "done" / "rows-part-4.json").read_text()) == {"square": 16}
    assert run(tmp_path / "done", pytest.fail) == (records, {})  # nothing is left for the stage


def test_some_parts_may_be_set_aside(tmp_path: Path) -> None:
    def work(number: int) -> int:
        return 10 // (number - 2)

    with pytest.raises(PartsFailedError, match=r"1 of 5 parts failed .*: rows/part-2: .*"):
        run(tmp_path, work)
    records, failed = run(tmp_path, work, max_failed=1)
    assert [*records] == [name for name in PARTS if name != "rows/part-2"]
    assert [*failed] == ["rows/part-2"]
    assert "ZeroDivisionError" in failed["rows/part-2"]
