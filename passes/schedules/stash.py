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

The order is that of 2bw with that lag.  Nothing can be summed over stages whose weights differ in
age: neither a norm of all gradients nor the gradients of a tied parameter.
"""

from pdcompile.passes.schedules.two_bw import order as order
