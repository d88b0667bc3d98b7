"""Which way a metric is better, and how far it moves by chance: one table of rules over metrics' names."""

import re
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "zero", "either"]


@dataclass(frozen=True)
class Rule:
    """What is known of the metrics whose names match; the first rule that matches counts."""

    pattern: str  # a regular expression, found anywhere in the name
    better: Better  # zero: anything else is a fault; either: a size or a finding, never judged
    noise: float = 0.0  # what runs of the same commit differ by
    relative: bool = True  # whether noise is a share of the smaller of the two values
    share: float | None = None  # at most this share of the larger: noise in points hides all of what is small
    of_the_machine: bool = False  # seconds, rates, memory: nothing to compare between machines or single runs

    def between(self, old: float, new: float) -> float:
        """How far two values may be apart. Which of them is the old one does not matter."""
        low, high = sorted((abs(old), abs(new)))
        noise = self.noise * (low if self.relative else 1.0)
        return noise if self.share is None else min(noise, self.share * high)


RATIO = 0.15  # two timings of one machine, taken in turns: rounds differ by a tenth either way
SHORT = 0.5  # the same where one of the two is too short to be timed well
QUALITY, SMALL = 0.05, 0.5  # recall and its kin between seeds, and where it is low; docs/results/readings.md
TIMING = 0.10  # of medians of several runs, beside the test that their ranges are apart

RULES = (
    Rule(r"^loads_per_actor$|^lost_parts_max$", "lower", 0.5, relative=False),
    Rule(r"^(finished_share|resolve_gpu|resolve_vllm|joined|digests_equal)$", "higher", 0.01, relative=False),
    Rule(r"^(lost|duplicates$|doubled$|undocumented|wrong|server_errors$|accepted_invalid$)", "zero"),
    Rule(r"^open_doors", "zero"),
    # Exact searches miss nothing, but for graphs that are walked as far as their databases allow.
    Rule(r"^recall\d+_(exact|hybrid|export)_", "higher", 0.01, relative=False),
    Rule(r"^(qdrant|milvus)_over_own_latency$", "higher", SHORT),
    Rule(r"^hedge_p99_cut$", "higher", 0.15, relative=False),
    Rule(r"^p99_\d+_slowdown$", "lower", SHORT),
    Rule(r"^requests_per_part", "lower", 0.5, relative=False),
    # Size and shape of the package: counts, the same on every machine.
    Rule(r"^import_cycles$", "zero"),
    Rule(r"^(files|lines|functions_over_60|single_importer_modules|\w+_on_query_walk)$", "lower", 0.01),
    Rule(r"^median_file$", "either"),
    Rule(r"^comment_share$", "higher", 0.001, relative=False),
    Rule(r"^(core_install_mb|wheel_mb)$", "lower", 0.02),
    Rule(r"^(help|import|python)_s$", "lower", SHORT, of_the_machine=True),
    Rule(r"^core_install_s$", "either"),  # the network's
    Rule(r"^read_mb_s$", "higher", SHORT),
    Rule(r"^quickstart_s3_over_local$", "lower", RATIO),
    Rule(r"^(driver_rss_\w+|plan_(requests|driver)_error_max)$", "lower", RATIO),
    Rule(r"^plan_seconds_error_max$", "lower", SHORT),
    Rule(r"^(control_open_doors|silent_on_the_machine|listeners)$", "either"),
    Rule(r"^faults_survived$", "higher"),
    Rule(r"_us_per_row$", "lower", SHORT, of_the_machine=True),
    Rule(r"^shuffle(_memory)?_over_ray_data$", "lower", RATIO),
    Rule(r"_r10(_in_plain_lines)?$", "higher", QUALITY, relative=False),
    Rule(r"^errors_per_request$", "lower", 0.005, relative=False),
    Rule(r"_s_per_gb$", "lower", SHORT, of_the_machine=True),
    Rule(r"^elastic_loss_difference_max$", "lower", 0.02, relative=False),
    Rule(r"^max_difference$", "lower", 1e-6, relative=False),
    Rule(r"^(faults|kills|requests|cases|errors|documents_growth|tokens_per_query|seismic_from)$", "either"),
    Rule(r"^orders_|^hybrids$", "either"),  # how many were compared
    Rule(r"^order_kept_share$|^first_token_overlap$", "higher", QUALITY, relative=False),
    Rule(r"^hybrid_not_below_halves$", "higher", 0.5, relative=False),
    Rule(r"^ce_rank_agreement$", "higher", 0.005, relative=False),
    Rule(r"^untrained_gap$", "higher", QUALITY, relative=False),
    Rule(r"^r2_", "higher", 0.1, relative=False),
    # An experiment's findings and their p-values: what is right depends on the arm.
    Rule(r"_(relative|p_holm)$", "either"),
    Rule(r"_kept_mean$", "higher", 0.01, relative=False),
    Rule(r"^ndcg_difference_", "lower", 0.001, relative=False),
    Rule(r"cosine", "higher", 0.001, relative=False),
    Rule(r"streaming_recall_gap", "lower", 1.0, relative=False),  # points
    Rule(r"(_over_scaling\w+_R50)$", "higher", QUALITY, relative=False, share=SMALL),
    Rule(
        r"(^|/|_)(R@\d+|MRR@\d+|nDCG@\d+|MAP|ndcg\d+|auc|recall\d+)(_|$)",
        "higher",
        QUALITY,
        relative=False,
        share=SMALL,
    ),
    # One side takes micro- or milliseconds: single runs of equal code were a third apart on a busy machine.
    Rule(r"^take_\w+_over_arrow$|^lookup_", "higher", SHORT),
    Rule(r"^document_(warm|cold)_\w+_over_ours$", "higher", SHORT),
    Rule(r"^(searcher_bytes_per_document_over_index|(swap_peak|two_replicas)_\w+_over_one)$", "lower", RATIO),
    Rule(r"^hnsw_\d+_recall_gap$", "lower", 0.005, relative=False),
    # Costs over costs, where ours stand above the line; everywhere else X_over_Y is what is gained.
    Rule(r"^(us_per_query|shards4|peak_memory|base_)\w*_over_", "lower", RATIO),
    Rule(r"driver_mb_largest_over_smallest|_memory_growth$|_slowdown$", "lower", RATIO),
    Rule(r"growth_exponent", "lower", 0.2, relative=False),
    Rule(r"bytes_per", "lower", 0.02),
    Rule(r"mfu$", "higher", TIMING, of_the_machine=True),
    Rule(r"(_over_|_speedup|^by_the_clock_)", "higher", RATIO),
    Rule(r"(per_s(econd)?(_|$)|rps|throughput|qps)", "higher", TIMING, of_the_machine=True),
    Rule(r"(^|_)(us|ms|seconds?|minutes|mb|gb)(_|$)", "lower", TIMING, of_the_machine=True),
)


def rule(metric: str) -> Rule | None:
    """The first rule whose pattern is found in the name; None: nobody said what is better."""
    return next((each for each in RULES if re.search(each.pattern, metric)), None)
