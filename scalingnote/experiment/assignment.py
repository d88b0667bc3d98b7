"""Who sees which arm: a unit (a user, or a request without one) and the shares come in, an arm comes out.

Nothing is stored and nobody is asked: any process, release of Python or reader of the log finds the same
arm. Each arm draws an exponential waiting time from a hash of (experiment, arm, unit), at a rate of its
share, and the shortest wins (weighted rendezvous hashing). So an arm wins by its share, whatever the order of
the arms, and when shares change

- between any two arms units move one way only, to the one whose share grew by the larger factor;
- with two arms, or one arm growing at the cost of all others in proportion (a new one, say), exactly the
  share that must move does;
- otherwise at most 2d / (1 + d) move where d must. In the worst case no rule that sees only the present
  shares moves fewer (correlated sampling; Bavarian et al., 2016, "The optimality of correlated sampling").
"""

import math
from hashlib import blake2b

from scalingnote.experiment.config import Arm, TrafficSplit


def unit_of(user_id: str | None, request_id: str, *, secret: str = "") -> str:
    """What is assigned and logged: ``u:`` and a hash of the user's id, else ``r:`` and the request's id.

    The hash alone is no anonymity where ids can be guessed: give a `secret`, the same for all gateways and
    for as long as an experiment runs.
    """
    if not user_id:
        return f"r:{request_id}"
    key = blake2b(secret.encode()).digest()
    return f"u:{blake2b(user_id.encode('utf-8', 'surrogatepass'), digest_size=16, key=key).hexdigest()}"


def arm_of(unit: str, split: TrafficSplit) -> Arm:
    """The arm of a unit in an experiment; in experiments of other names it is independent of this one."""
    if len(split.arms) == 1:
        return split.arms[0]
    with_traffic = (arm for arm in split.arms if arm.share > 0)
    return min(with_traffic, key=lambda arm: (_waiting(split.name, arm.name, unit) / arm.share, arm.name))


def _waiting(*parts: str) -> float:
    """A draw from the exponential distribution of mean 1 that belongs to `parts`."""
    text = "\x1f".join(parts).encode("utf-8", "surrogatepass")
    drawn = int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 11  # as many bits as a float has
    return -math.log((drawn + 0.5) / 2**53)
