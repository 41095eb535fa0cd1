"""What must not change the bytes of an out: configuration, launching, tracking, provenance, progress."""
