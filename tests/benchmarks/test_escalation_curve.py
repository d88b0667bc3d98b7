import numpy as np

from benchmarks.escalation import EscalationPoint, curve


def test_curve():
    doubts = np.array([-0.3, -0.1, -0.2, -0.4])
    student, teacher = np.array([[0], [0], [1], [1]]), np.array([[1], [1], [0], [1]])
    points = curve(
        doubts,
        student,
        teacher,
        lambda ids: ids[:, 0].astype(float),  # document 1 is relevant to every query
        shares=(0.0, 0.25, 0.5, 1.0),
    )
    assert points == [
        EscalationPoint(0.0, 0.0, 0.5),
        EscalationPoint(0.25, 0.25, 0.75),
        EscalationPoint(0.5, 0.5, 0.5),
        EscalationPoint(1.0, 1.0, 0.75),
    ]
