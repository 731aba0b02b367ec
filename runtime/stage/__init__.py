"""One stage at run time: modules and weights, forward and backward, replicas, random draws."""
