"""From models to Programs: modules (``torch``), Hugging Face configs (``huggingface``), entry points (``entry``)."""
