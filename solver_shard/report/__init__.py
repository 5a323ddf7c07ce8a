"""A plan as a picture: its timeline."""
