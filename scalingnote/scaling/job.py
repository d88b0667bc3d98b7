"""Build the ladder's artifact from trained dual encoders: their table, the fitted laws and plots."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from scalingnote.log import environment, get_logger
from scalingnote.scaling import ladder, laws
from scalingnote.scaling.config import LadderConfig
from scalingnote.scaling.ladder import markdown
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, fingerprint

log = get_logger("ladder")


def run(config: LadderConfig, trained: Sequence[Artifact], *, output: str) -> Artifact:
    """Build the `ladder` artifact below the folder `output`, named by config and rungs."""
    parents = {f"rung_{number:03d}": artifact for number, artifact in enumerate(trained)}
    place = fs.absolute(fs.join(output, fingerprint("ladder", config, parents)[:12]))
    draft = Draft(place, kind="ladder", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    table = ladder.rung_table([ladder.rung_row(artifact) for artifact in trained])
    fits = ladder.fit_laws(table, config=config)
    report = ladder.law_report(table, fits, config=config) | {"environment": environment()}
    draft.write_table("ladder.parquet", table)
    draft.write_json("report.json", report)
    draft.write_bytes("report.md", markdown(table, report).encode())
    with tempfile.TemporaryDirectory() as folder:
        for kind, law in fits.items():
            laws.draw(law, Path(folder) / f"{kind}.png", level=config.level)
            draft.write_bytes(f"{kind}.png", (Path(folder) / f"{kind}.png").read_bytes())
    log.info("%d rungs, %d laws: %s", len(table), len(fits), fs.join(place, "report.md"))
    return draft.commit(counts={"rungs": len(table), "laws": len(fits)})
