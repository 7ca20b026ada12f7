"""What other programs saved, opened for reading: torch's own files and safetensors. No torch."""
