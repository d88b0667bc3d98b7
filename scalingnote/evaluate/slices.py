"""Slices of the test queries: what is known of each comes in, its label and means per label go out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scalingnote.evaluate.significance import Values
from scalingnote.planner.words import words

Slice = dict[str, Any]  # "label", "queries" (how many), "methods": method -> measure -> mean


def sliced(labels: Sequence[str], methods: Mapping[str, Values], *, order: Sequence[str]) -> list[Slice]:
    """Means of every measure over the queries of each label, labels in a given order."""
    of = np.array(labels)
    return [
        {
            "label": label,
            "queries": int(mine.sum()),
            "methods": {
                name: {measure: float(values[mine].mean()) for measure, values in row.items()}
                for name, row in methods.items()
            },
        }
        for label in order
        if (mine := of == label).any()
    ]


def by_length(queries: Sequence[str]) -> tuple[list[str], list[str]]:
    """Labels, and their order: short, middle and long queries, about a third each, by their words."""
    lengths = [len(words(query)) for query in queries]
    low, high = np.quantile(lengths, [1 / 3, 2 / 3], method="lower").astype(int).tolist()
    order = [f"short (≤ {low} words)", f"middle ({_span(low + 1, high)} words)", f"long (> {high} words)"]
    return [order[(length > low) + (length > high)] for length in lengths], order


def by_topic(topics: Sequence[str], *, most: int) -> tuple[list[str], list[str]]:
    """The `most` frequent topics, and all others together; the topic is the relevant document's.

    The others have a label that no frequent topic has.
    """
    counted = Counter(topic for topic in topics if topic)
    frequent = sorted(counted, key=lambda topic: (-counted[topic], topic))[:most]
    rest = "other"
    while rest in frequent:
        rest = f"any {rest}"
    return [topic if topic in frequent else rest for topic in topics], [*frequent, rest]


def by_frequency(counts: Sequence[int]) -> tuple[list[str], list[str]]:
    """Head and tail: queries by how many training queries have their rarest word.

    Those whose word is met more often than the median of the words that are met at all are the head.
    """
    met = [count for count in counts if count]
    median = int(np.quantile(met, 0.5, method="lower")) if met else 0
    order = [f"head (word met > {median} times)", f"tail ({_span(1, median)} times)", "word never met"]
    return [order[2 if not count else 0 if count > median else 1] for count in counts], order


def _span(first: int, last: int) -> str:
    return f"{first}–{last}" if first < last else str(first)
