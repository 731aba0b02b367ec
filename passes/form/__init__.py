"""The form that stages are written in: expressions, the tree of modules, and when values die."""
