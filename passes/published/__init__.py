"""Problems that other people published, read as they are: device placement, PipeDream, Piper."""
