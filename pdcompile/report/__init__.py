"""Reports for a person: tables, timelines, memory, HTML, traces for Perfetto."""
