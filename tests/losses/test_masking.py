from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from scalingnote.losses import false_negative_documents, false_negative_queries

IDS = st.integers(0, 5)


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(IDS, IDS, st.lists(st.integers(-1, 5), min_size=2, max_size=2)), min_size=1),
    negatives=st.lists(IDS),
    data=st.data(),
)
def test_masks_equal_what_sets_say(rows, negatives, data):
    query_ids, positive_ids, known = zip(*rows, strict=True)
    start = data.draw(st.integers(0, len(rows) - 1))  # this rank has the rows from here on
    everything = (tensor(query_ids), tensor(positive_ids), tensor(known))
    own = tuple(column[start:] for column in everything)
    candidates = [*positive_ids, *negatives]
    found = false_negative_documents(*own, all_query_ids=everything[0], candidate_ids=tensor(candidates))
    for i, (query_id, positive_id, others) in enumerate(rows[start:]):
        good = {positive_id, *others}
        expected = [
            document_id in good or (j < len(rows) and query_ids[j] == query_id)
            for j, document_id in enumerate(candidates)
        ]
        assert found[i].tolist() == expected
    found = false_negative_queries(
        *own[:2],
        all_query_ids=everything[0],
        all_positive_ids=everything[1],
        all_known=everything[2],
    )
    for i, (query_id, positive_id, _) in enumerate(rows[start:]):
        expected = [q == query_id or positive_id in {p, *others} for q, p, others in rows]
        assert found[i].tolist() == expected
