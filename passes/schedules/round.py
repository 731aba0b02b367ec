"""RoundPipe: ranks that take what comes next in turn (Luo et al., 2026, arXiv 2604.27085).

No stage has a rank of its own: of S stages and R ranks of one host, stage s of microbatch i is on
rank (i S + s) mod R.  So a stage that is much longer than the others, such as a head with a large
vocabulary, keeps all ranks busy in turn, and how many stages there are is free.

It is a case of equal replicas of stages in turn (`interleaved`): with g = gcd(S, R) stage s has the
R / g ranks r = s mod g, and takes them in another order than the stage before.  On each rank
microbatches come by as they do there, one stage after the other, and from its first backward on
one forward and one backward take turns, so that what is sent has one of these to travel in.
Three stages on two ranks, four microbatches, a backward twice as long as a forward:

PICTURE
"""

from __future__ import annotations

from pdcompile.passes.schedules.interleaved import order

__all__ = ["order"]
