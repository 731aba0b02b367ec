"""Vertical sync (PipeDream: Narayanan et al., SOSP 2019): stashed weights of one age.

As under weight stashing every microbatch is a minibatch with an update of its own; but minibatch t
runs on W_max(t - w, 0) on all stages, where w is the warm-up of the first one, which cannot have a
newer one.  So every stage holds w + 1 versions, and what sums over stages is possible.  Three
stages, warm-up 2 1 0, a backward twice as long as a forward; numbers are minibatches:

    stage 0  F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 .. B4 B4 .. B5 B5
    stage 1     F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 .. B5 B5
    stage 2        F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5

The time is that of weight stashing.  Where the update waits for other stages (a norm of all
gradients, a tied parameter) it comes as late as legal, before the stage's first forward on the
weights that it makes: nobody then waits for a minibatch that the first stage has not ended, and
the stage holds the gradients of w + 1 - warmup minibatches.
"""

from pdcompile.passes.schedules.two_bw import order as order
