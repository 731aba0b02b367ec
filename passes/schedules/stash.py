"""Weight stashing (PipeDream: Narayanan et al., SOSP 2019): 1F1B without minibatches.

Every microbatch is a minibatch and is followed by its update, stage by stage, as soon as its
backward is over.  In between a stage has begun as many others as its warm-up is deep: minibatch t
runs forward and backward on the weights that the stage had when it came, W_max(t - warmup, 0),
which are another version on every stage.  So a stage holds warmup + 1 versions, the last one holds
one.  Four stages, warm-up 3 2 1 0, a backward twice as long as a forward; numbers are minibatches:

    stage 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 F4 B1 B1 F5 B2 B2 .. B3 B3 .. B4 B4 .. B5 B5
    stage 1     F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 .. B4 B4 .. B5 B5
    stage 2        F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 .. B5 B5
    stage 3           F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5

With replicas this is PipeDream's 1F1B-RR: those of a stage take the minibatches in turn, and the
stage updates when each of r has had one, with the mean of their gradients.  Such a group counts as
one: minibatch t runs on W_max(t // r - warmup, 0), so that all of a group run on the same weights.
The first forward of a group waits for the update that it needs, hence for all replicas, which go
on together.  Two stages of 2 and 1 replicas, warm-up 1 0, those of the first half as fast:

    rank 0  F0 F0 F2 F2 .. B0 B0 B0 B0 .. .. .. F4 F4 B2 B2 B2 B2 B4 B4 B4 B4
    rank 1  F1 F1 F3 F3 .. .. .. .. B1 B1 B1 B1 F5 F5 B3 B3 B3 B3 .. .. B5 B5 B5 B5
    rank 2  .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5

A group that is not complete waits for its rest, over flushes and evaluations.

The order is that of 2bw with that lag.  Nothing can be summed over stages whose weights differ in
age: neither a norm of all gradients nor the gradients of a tied parameter.
"""

from pdcompile.passes.schedules.two_bw import order as order
