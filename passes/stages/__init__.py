"""From a cut to stages: the plan over ops, what crosses boundaries, arguments and names."""
