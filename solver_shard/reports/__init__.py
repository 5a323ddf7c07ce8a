"""A plan for the eye: one HTML file that opens from disk, and a timeline for Perfetto."""
