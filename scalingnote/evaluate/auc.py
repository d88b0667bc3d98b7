"""AUC over judged pairs: a score and a label per pair of query and document come in, one number goes out.

All pairs of the set are ranked together, whatever their query, as in ScalingNote (section 5.1, AUC-SAT and
AUC-REL): it asks whether scores mean the same for every query.
"""

import math

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy import stats


def auc(scores: Float[ndarray, " pairs"], labels: Float[ndarray, " pairs"]) -> float:
    """How often the better one of two differently labelled pairs has the higher score; equal ones count half.

    For two labels this is the area under the ROC curve (Mann and Whitney, 1947). For more, every two pairs
    whose labels differ count the same. NaN where all labels are equal.
    """
    right = total = 0.0
    for label in np.unique(labels)[1:]:
        among = labels <= label
        better = labels[among] == label
        ranks = stats.rankdata(scores[among])
        number = int(better.sum())
        # The sum of the better ones' ranks, less the ranks that they take from one another.
        right += float(ranks[better].sum()) - number * (number + 1) / 2
        total += number * float((~better).sum())
    return right / total if total else math.nan
