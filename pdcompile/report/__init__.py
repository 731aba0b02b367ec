"""What a person looks at: tables, timelines, memory, HTML, traces for Perfetto."""
