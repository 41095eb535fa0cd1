"""What can change the bytes of an out. Imports neither harness nor mlflow nor omegaconf."""
