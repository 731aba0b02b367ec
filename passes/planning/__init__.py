"""Around the search for a cut: the whole space, memory limits, refined costs, what-if, reasons."""
