"""The benchmark of query association does what the job does: its filter drops keys that no query owns."""

from pathlib import Path

from benchmarks import association_steps
from scalingnote.collect.config import AssociationConfig


def test_the_filter_spares_candidates_and_changes_no_pair(tmp_path: Path):
    found = {}
    for filtered in (True, False):
        folder = tmp_path / str(filtered)
        folder.mkdir()
        slices = association_steps.write_log(folder, 2_000)
        found[filtered] = association_steps.run(folder, slices, config=AssociationConfig(), filtered=filtered)
    assert found[True]["candidate_keys_kept"] < 0.5 * found[True]["candidate_keys"]
    assert found[False]["candidate_keys_kept"] == found[True]["candidate_keys"]
    assert 0 < found[True]["moved_mb"] < found[False]["moved_mb"]
    assert found[True]["click"] == found[False]["click"] > 0
