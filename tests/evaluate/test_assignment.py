from collections import Counter

import pytest
from scipy import stats

from scalingnote.core.config import load
from scalingnote.core.errors import ConfigError
from scalingnote.evaluate.experiment.config import Arm, ExperimentConfig, TrafficSplit, arm_of, unit_of

SHARES = {"control": 0.5, "student": 0.3, "lookup": 0.2}
UNITS = [f"u:{i}" for i in range(12_000)]


def split(shares=SHARES, name="towers") -> TrafficSplit:
    return TrafficSplit(name=name, arms=tuple(Arm(name=n, share=s) for n, s in shares.items()))


def arms(shares=SHARES, name="towers") -> list[str]:
    traffic = split(shares, name)
    return [arm_of(unit, traffic).name for unit in UNITS]


def moves_between(before, after) -> Counter:
    return Counter((a, b) for a, b in zip(arms(before), arms(after), strict=True) if a != b)


def test_assignments_are_those_of_every_release():
    golden = ["lookup", *["control"] * 5, *["lookup"] * 2, *["control"] * 3, "student"]
    assert [arm_of(f"u:{i}", split()).name for i in range(12)] == golden
    assert unit_of("alice", "r1") == "u:6960067e38c2b031188ea475a956826b"
    assert unit_of("alice", "r1", secret="s") == "u:a4bf826bb95de7d7f068ad19def0bf6c"
    assert unit_of("王", "x") == "u:22a0b10f5d296a21346c66f8e4f1f95c"
    assert unit_of(None, "r1") == unit_of("", "r1") == "r:r1"
    assert unit_of("\ud800", "r1").startswith("u:")  # half of a surrogate pair


def test_every_arm_gets_its_share():
    counts = Counter(arms())
    for name, share in SHARES.items():
        low, high = stats.binom.interval(0.9999, len(UNITS), share)
        assert low <= counts[name] <= high


def test_experiments_with_different_names_are_independent():
    table = Counter(zip(arms(name="towers"), arms(name="versions"), strict=True))
    observed = [[table[a, b] for b in SHARES] for a in SHARES]
    assert stats.chi2_contingency(observed).pvalue > 0.001
    assert arms(name="towers") != arms(name="versions")


def test_the_order_of_arms_does_not_matter():
    assert arms(dict(reversed(SHARES.items()))) == arms()


def test_a_new_split_moves_few_units():
    """Compare shares of units, with a tolerance of four standard deviations for 12,000 units."""
    two = moves_between({"a": 0.5, "b": 0.5}, {"a": 0.4, "b": 0.6})
    assert set(two) == {("a", "b")}
    assert two["a", "b"] / len(UNITS) == pytest.approx(0.1, abs=0.011)
    new = moves_between(SHARES, {"control": 0.45, "student": 0.27, "lookup": 0.18, "new": 0.1})
    assert {after for _, after in new} == {"new"}
    assert new.total() / len(UNITS) == pytest.approx(0.1, abs=0.011)
    # Units move in one direction between two arms; the total is 1 - sum_i 1 / sum_j max(ratios), here 0.127
    # for 0.1.
    three = moves_between(SHARES, {"control": 0.4, "student": 0.3, "lookup": 0.3})
    assert set(three) == {("control", "student"), ("control", "lookup"), ("student", "lookup")}
    assert three.total() / len(UNITS) == pytest.approx(0.1273, abs=0.0125)


def test_an_arm_without_a_share_gets_no_units():
    assert set(arms({"a": 0.5, "b": 0.5, "c": 0})) == {"a", "b"}
    assert arm_of("u:1", TrafficSplit()).name == "default"


TWO = "[{name: a, share: 0.5}, {name: b, share: 0.5}]"


@pytest.mark.parametrize(
    ("arms", "times", "message"),
    [
        ("[{name: a, share: 0.5}, {name: b, share: 0.4}]", {}, r"sum to 0\.9 \(a 0\.5, b 0\.4\)"),
        ("[{name: a, share: 0.5}, {name: a, share: 0.5}]", {}, "arms repeat the name 'a'"),
        ("[{name: 'a b', share: 1}]", {}, "String should match pattern"),
        ("[]", {}, "at least 1 item"),
        ("[{name: a}]", {}, "fewer than two arms with traffic"),
        ("[{name: a, share: 0}, {name: b, share: 0.5}, {name: c, share: 0.5}]", {}, "'a' has no traffic"),
        (TWO, {"start": "2026-01-01T00:00:00"}, "timezone"),
        (TWO, {"start": "2026-01-02T00:00:00Z", "end": "2026-01-01T00:00:00Z"}, "is not before end"),
    ],
)
def test_an_invalid_experiment_is_refused(arms, times, message):
    options = [f"{name}={time}" for name, time in times.items()]
    with pytest.raises(ConfigError, match=message):
        load(ExperimentConfig, [], ["logs=[logs]", f"split.arms={arms}", *options])
