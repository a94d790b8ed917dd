"""To and from the Hugging Face Hub."""
