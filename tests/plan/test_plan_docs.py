"""Examples of docs/guides/scaling.md: run again, and compared with calculations by hand."""

import contextlib
import io
import re
import shlex
from math import ceil, sqrt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import training_tables
from scalingnote.cli import main as cli
from scalingnote.plan.config import CONSTANTS
from scalingnote.plan.laws import joint_law, power_law

DOCS = Path(cli.__file__).parents[2] / "docs/guides/scaling.md"
TEXT = DOCS.read_text(encoding="utf-8")
((SHOWN_COMMAND, SHOWN),) = re.findall(
    r"^```\n\$ (scalingnote plan .*?[^\\])\n(.*?)^```$", TEXT, flags=re.M | re.S
)
(OTHER_COMMAND,) = re.findall(r"^```bash\n(scalingnote plan .*?)^```$", TEXT, flags=re.M | re.S)


def printed(command: str) -> str:
    """Run a command of the page, and return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert cli.main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    return output.getvalue()


def figures(text: str, label: str) -> list[float]:
    """Return the numbers of a row of a plan, after its label."""
    (row,) = re.findall(rf"^  {re.escape(label)}  +(.*)$", text, flags=re.M)
    return [float(cell.replace(",", "")) for cell in re.findall(r"\d[\d,]*\.?\d*(?:e\+?\d+)?", row)]


def hours(operations: float, peak: float) -> float:
    return operations / (peak * 0.4) / 3600


def test_the_example_prints_what_the_page_shows():
    assert printed(SHOWN_COMMAND).rstrip() == SHOWN.rstrip(), "run the command and paste its output"


def test_two_billion_documents_by_hand():
    # Layer of Qwen2.5-7B: queries and output 3584 x 3584, keys and values 3584 x 512, three of 3584 x 18944.
    weights = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert weights == 6_525_288_448
    last = 28 * 3584 * 18944  # the last product of a layer, which is not recomputed

    def forward(tokens: int) -> float:
        return 2 * tokens * weights + 4 * tokens**2 * 28 * 3584 / 2  # causal: half of all pairs of tokens

    encode = 2e9 * forward(250)
    pair = (
        4 * (forward(16) + 2 * forward(250)) - 2 * (16 + 2 * 250) * last
    )  # forward, backward (twice), forward
    student = 3 * (2 * 16 * 4 * (4 * 768**2 + 2 * 768 * 3072) + 4 * 16**2 * 4 * 768 + 2 * 768 * 128)
    distil = 1e8 * (forward(16) + 100 * student)
    work = {
        "train": hours(1e8 * pair, 989e12),
        "distil": hours(distil, 989e12),
        "encode": hours(encode, 989e12) / 0.914,
    }
    for name, spent in work.items():
        row = figures(SHOWN, name)
        assert row == pytest.approx([spent, spent / 64 / 24, 4.0 * spent], rel=6e-3), name
    assert figures(SHOWN, "together")[0] == pytest.approx(sum(work.values()), rel=1e-3)
    assert figures(SHOWN, "128 dimensions") == pytest.approx([512, 256, 512 * 0.023], abs=0.5)
    assert figures(SHOWN, "GB of one version in searchers") == [round(2 * (170.1 + 105.5 - 56.1))]
    assert figures(SHOWN, "GB of texts on searchers' disks") == [2 * 2 * 340]
    scan = 490 * sqrt(2000)  # µs
    monthly = {}
    for memory in (64, 128, 256, 512, 1024):
        shards = ceil(2 * 439 / (0.75 * memory))
        spent = scan + (shards - 1) * (1969 - 621) / 3
        cores = memory / 8
        replicas = max(2, ceil(20_000 * spent / 1e6 / 0.6 / shards / cores))
        call = (2 / 501 - 2 / 1556) / 2  # core seconds of a call to a replica
        fan_out = 20_000 * call * (shards - 1) / 0.6
        monthly[memory] = (shards * replicas * cores + fan_out) * (0.03 + 8 * 0.004) * 730
        label = f"{memory:,} GB, {cores:g} cores" + (" (cheapest)" if memory == 1024 else "")
        expected = [shards, replicas, shards * replicas, spent / shards / 1000, fan_out, monthly[memory]]
        assert figures(SHOWN, label) == pytest.approx(expected, rel=5e-3), memory
    assert min(monthly.values()) == monthly[1024]
    # Rates were measured at 9.6796875 tokens per query; these queries have 16.
    slower = 16 / 9.6796875
    encoders, gateways = ceil(20_000 / 153.6022 * slower / 0.6), ceil(20_000 * 2 / 501 / 0.6)
    assert (encoders, gateways) == (359, 134)
    core = 0.062 * 730
    assert figures(SHOWN, "query encoders") == pytest.approx([359, 359 * core], abs=0.5)
    assert figures(SHOWN, "gateways") == pytest.approx([134, 134 * core], abs=0.5)
    assert ceil(20_000 / 83534 * slower / 0.6) == 1  # "needs one core"
    month = 512 * 0.023 + monthly[1024] + (359 + 134) * core
    assert figures(SHOWN, "a month")[0] == pytest.approx(month, abs=0.5)
    offline = sum(figures(SHOWN, stage)[5] for stage in CONSTANTS["stages"])
    assert figures(SHOWN, "once") == pytest.approx([4.0 * sum(work.values()) + offline], abs=3)


def test_ten_million_documents_by_hand():
    plan = printed(OTHER_COMMAND)
    # Qwen2.5-0.5B: queries and output 896 x 896, keys and values 896 x 128, three of 896 x 4864.
    weights = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    encode = hours(1e7 * (2 * 250 * weights + 4 * 250**2 * 24 * 896 / 2), 121e12) / 0.914
    assert figures(plan, "encode") == pytest.approx([encode, encode / 24, 0.7 * encode], rel=6e-3)
    assert figures(plan, "together")[0] == 19.1  # GPU hours on the page
    assert (figures(plan, "once")[0], figures(plan, "a month")[0]) == (14.6, 362)
    # One node holds the index, and one core answers: half of the cost is the second copy.
    month = 2 * 2 * 0.062 * 730
    row = figures(plan, "16 GB, 2 cores (cheapest)")
    assert row == pytest.approx([1, 2, 2, 1.55, 0, month], abs=0.1)


def test_the_table_of_laws_has_their_values():
    size, data = {"c": 3.82e5, "alpha": 0.14, "delta": 0.18}, {"c": 2.60e3, "alpha": 0.14, "delta": 1.4e-7}
    joint = {"a": 3.15e5, "b": 1.16e2, "alpha": 0.12 * 0.770, "beta": 0.770, "delta": 0.108}
    small, seven, half = 809_724.0, 6.53e9, 3.58e8
    expected = [
        (power_law(half, **size), None, joint_law(half, small, **joint)),
        (power_law(seven, **size), power_law(small, **data), joint_law(seven, small, **joint)),
        (None, power_law(1e8, **data), joint_law(seven, 1e8, **joint)),
    ]
    lines = [line for line in TEXT.splitlines() if line.startswith("| Qwen2.5-")]
    assert len(lines) == len(expected)
    for line, values in zip(lines, expected, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
        assert cells == ["" if value is None else f"{value:.3f}" for value in values]
    # The number of pairs at which a 7B model is optimal by Eq. 20: B / (0.12 (A/N)^0.12).
    assert round(116 / (0.12 * (3.15e5 / seven) ** 0.12)) == 3186


@pytest.mark.parametrize("page", training_tables.PAGES)
def test_tables_of_the_docs_match_the_configs(page: str):
    text = (training_tables.ROOT / page).read_text(encoding="utf-8")
    assert text == training_tables.renewed(page), "run `python tests/training_tables.py`"


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    assert "draws=200" in code
    parameters, data = (axis.ravel() for axis in np.meshgrid([1e6, 1e7, 1e8], [1e4, 1e5, 1e6]))
    entropy = ((3e5 / parameters) ** 0.12 + 2e3 / data) ** 0.77 + 0.1
    columns = {"parameters": parameters, "examples": data, "contrastive_entropy": entropy}
    pq.write_table(pa.table(columns), tmp_path / "ladder.parquet")
    monkeypatch.chdir(tmp_path)
    exec(code.replace("draws=200", "draws=3"), {})
    assert "parameters" in capsys.readouterr().out
    assert (tmp_path / "law.png").stat().st_size > 1000
