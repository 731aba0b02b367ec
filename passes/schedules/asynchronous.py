"""Asynchronous updates (Rescaled ASGD: Mahran et al., 2026, arXiv 2605.13434), in a fixed order.

Every microbatch is a minibatch, which one replica of each stage takes; its update is of these
gradients alone, and all replicas of the stage make it: none waits until each of them has had a
turn.  Turns take the place of clocks: a replica of three times the speed has three turns of four,
and what is trained is the same in every run.  Minibatch t runs on W_max(t - lag, 0), with the first
stage's warm-up as the lag of all stages: as many minibatches are on their way at one time, over all
replicas.  A stage on two ranks with turns 0 0 0 1 and warm-up 3, rank 1 three times as slow;
numbers are minibatches:

    stage 0, rank 0  F0 F1 F2 B0 F4 B1 F5 B2 F6 .. .. B4 F8 B5 F9 B6
    stage 0, rank 1  F3 F3 F3 .. .. .. .. .. B3 B3 B3 F7 F7 F7 .. ..

A replica whose turns are rare would have as little weight in what is minimised.  So the learning
rate of an update is multiplied by tau / mean tau, tau being the turns from one of the replica's to
its next: with turns 0 0 0 1 these are 4/3 and 4, and the factors 1/2 and 3/2.

The order is that of 2bw with that lag.
"""

from pdcompile.passes.schedules.two_bw import order as order
